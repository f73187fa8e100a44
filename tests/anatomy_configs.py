"""Two fixed models, and random small ones of every variant that the parts have."""

from functools import partial

from blocks import two_norms
from hypothesis import strategies as st
from zoo import RMS, layer, llama

from llmcli.config.attention import AttentionConfig, RopeConfig, ScoreConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.norm import HeadNorm, NormConfig

LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
config_of = partial(llama, vocab=50, width=12)  # a model of these layers, with a head of its own
QWEN = config_of(layer(
    MlpConfig(hidden=20, activation="silu", gated=True), heads=6, head_dim=4, value_dim=3,
    scale=0.5, qk_norm=RMS, qkv_bias=True, rope=RopeConfig(theta=1e4, dims=4),
))  # fmt: skip
GPT = config_of(
    layer(
        MlpConfig(hidden=48, activation="gelu_tanh", gated=False, bias=True), LAYER, heads=3,
        kv_heads=3, head_dim=4, value_dim=4, scale=0.5, rope=None, qkv_bias=True, out_bias=True,
    ),
    embedding=EmbeddingConfig(positions=64), final_norm=LAYER, head=HeadConfig(tied=True),
)  # fmt: skip

sizes = st.integers(1, 9)
flags = st.booleans()


@st.composite
def norms(draw):
    kind = draw(st.sampled_from(["rms", "layer"]))
    return NormConfig(kind=kind, eps=1e-5, bias=kind == "layer" and draw(flags))


@st.composite
def attentions(draw):
    kv_heads, head_dim, rope = draw(st.integers(1, 3)), draw(sizes), None
    if head_dim >= 2 and draw(flags):
        rope = RopeConfig(theta=100.0, dims=2 * draw(st.integers(1, head_dim // 2)))
    return AttentionConfig(
        heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads, head_dim=head_dim,
        value_dim=draw(sizes), rope=rope,
        qk_norm=draw(st.none() | st.sampled_from([RMS, HeadNorm(kind="layer", eps=1e-6)])),
        scores=ScoreConfig(scale=0.5, window=draw(st.none() | st.integers(1, 6))),
        qkv_bias=draw(flags), out_bias=draw(flags), clip=draw(st.sampled_from([None, 0.5])),
    )  # fmt: skip


@st.composite
def layers(draw):
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]))
    mlp = MlpConfig(
        hidden=draw(sizes), activation=activation, gated=draw(flags), bias=draw(flags)
    )  # fmt: skip
    return two_norms(draw(attentions()), mlp, draw(norms()), draw(norms()))


@st.composite
def models(draw):
    """Layers may differ from one another in everything but the width."""
    return config_of(
        *draw(st.lists(layers(), min_size=1, max_size=3)), vocab=draw(st.integers(1, 20)),
        width=draw(sizes), embedding=EmbeddingConfig(positions=draw(st.none() | st.just(64))),
        final_norm=draw(norms()), head=HeadConfig(tied=draw(flags), bias=draw(flags)),
    )  # fmt: skip
