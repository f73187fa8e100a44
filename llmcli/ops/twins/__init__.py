"""The slow, obvious twin of every operation here: loops over Python floats and lists, for tests.

Nothing is shared with the fast versions. The table in `llmcli.ops` says which is whose.
"""

from llmcli.ops.twins.activations import (
    gelu,
    gelu_tanh,
    sigmoid,
    silu,
    soft_cap,
    softplus,
    tanh,
)
from llmcli.ops.twins.attention import (
    attend,
    attention_layer,
    heads,
    rotate,
    score,
    softmax,
    softmax_in_place,
)
from llmcli.ops.twins.conv import causal_conv, causal_conv_step
from llmcli.ops.twins.norms import l2_norm, layer_norm, rms_norm
from llmcli.ops.twins.sampling import argmax, temperature, top_k, top_p
from llmcli.ops.twins.vectors import (
    add,
    dot,
    dot_in_lanes,
    gemv,
    largest,
    mean,
    mul,
    outer,
    total,
    tree,
)

__all__ = [
    "add",
    "argmax",
    "attend",
    "attention_layer",
    "causal_conv",
    "causal_conv_step",
    "dot",
    "dot_in_lanes",
    "gelu",
    "gelu_tanh",
    "gemv",
    "heads",
    "l2_norm",
    "largest",
    "layer_norm",
    "mean",
    "mul",
    "outer",
    "rms_norm",
    "rotate",
    "score",
    "sigmoid",
    "silu",
    "soft_cap",
    "softmax",
    "softmax_in_place",
    "softplus",
    "tanh",
    "temperature",
    "top_k",
    "top_p",
    "total",
    "tree",
]
