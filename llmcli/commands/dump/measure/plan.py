"""Which tensors are dumped, how large they are, and what the kernel has to show for each."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmcli import anatomy
from llmcli.anatomy.graph import graph
from llmcli.anatomy.names import known
from llmcli.commands.dump.report import DumpPlan
from llmcli.config import ModelConfig
from llmcli.graph.spec import DTYPE_BYTES, Call
from llmcli.inspect.formulas import formula_inputs
from llmcli.inspect.kernel import layer_of

# what is computed of the prompt's last token alone where nothing of this is wanted
OUTPUTS = ("ln_final.scale", "ln_final.out", "logits_raw", "logits")

# what is derived of a layer's attention and proven by what the kernel mixed with it
MATRICES = ("scores", "pattern")


def plan_dump(
    config: ModelConfig,
    names: Iterable[str],
    *,
    tokens: int,
    generate: int,
    dtype: str,
    cache: str | None = None,
) -> tuple[DumpPlan, ...]:
    """The tensors of `names` in execution order, for `tokens` of a prompt and `generate` new ones.

    `dtype`: the model's; `cache`: of keys and values, where it is another. Parameters in blocks are
    dequantized.
    """
    whole, wanted = tokens + generate, set(names)
    call = Call(batch=1, tokens=whole, past=0, phase="prefill", dtype=dtype, cache=cache)
    specs = [
        *anatomy.parameters(config, dtype=dtype),
        *anatomy.plan(config, call).tensors,
        *anatomy.states(config, batch=1, capacity=whole, dtype=dtype, cache=cache),
    ]
    by_name = {spec.name: spec for spec in specs}
    found = []
    for name in (name for name in known(config) if name in wanted):
        spec = by_name[name]
        batch = int(spec.kind != "parameter")
        shape = spec.shape[batch:]
        found.append(
            DumpPlan(
                name=name,
                kind=spec.kind,
                axes=spec.axes[batch:],
                shape=shape,
                dtype=spec.dtype or dtype,
                nbytes=math.prod(shape) * DTYPE_BYTES[spec.dtype or dtype],
                formula=spec.formula,
            )
        )
    return tuple(found)


def sources(config: ModelConfig, one: DumpPlan, *, check: bool) -> frozenset[str]:
    """The activations, written by the kernel, that are needed for it; `check`: and its checks.

    None for a parameter.
    """
    model = graph(config)
    if one.kind == "parameter":
        return frozenset()
    if one.kind == "state":
        state = model.states[one.name]
        if model.written(state.holds):
            return frozenset((state.holds, model.after(state)))
        reads = model[state.before].op.inputs  # of the map, and the values
        return frozenset((*model.sources(reads[0]), *reads[1:], model.after(state)))
    own = {one.name} if model.written(one.name) else set(model.sources(one.name))
    mixing = model.mixing(layer_of(one.name) or 0)
    if check and one.name.endswith(MATRICES) and mixing is not None:
        own |= {*mixing.op.inputs[1:], mixing.name}
    return frozenset(own) | (formula_inputs(config, [one.name]) if check else frozenset())


def last_layer(names: Iterable[str]) -> int | None:
    """The last block that has to run for these activations, None for the whole model."""
    layers = [0 if name in ("embed", "pos_embed") else layer_of(name) for name in names]
    numbers = [layer for layer in layers if layer is not None]
    return max(numbers) if len(numbers) == len(layers) else None
