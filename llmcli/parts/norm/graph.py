"""Normalization of the last axis: RMSNorm and LayerNorm."""

from __future__ import annotations

from llmcli.graph.node import Absent, Node, Parameter, PartGraph
from llmcli.graph.ops import Normalize, Scale
from llmcli.parts.norm.config import NormConfig


def norm_graph(
    norm: NormConfig,
    name: str,
    source: str,
    letter: str,
    words: tuple[str, str, str],
    *,
    layer: int | None,
    theirs: tuple[str, ...] = (),
    wide: bool = False,
) -> PartGraph:
    """`<name>.scale` `[T, 1]`, the divisor, and `<name>.out` `[T, D]`.

    `letter`: symbol of the output. `words`: descriptions of the norm and the output, and a remark
    for derivations. `theirs`: other names of the output. `wide`: the output is added to the stream,
    and is not the input of a product.
    """
    which, out, aside = words
    short = name.rpartition(".")[2]
    biased = f"{name}.b" if norm.bias else None
    weights = f"{name}.w" if norm.weights else None
    ends = layer is None
    return PartGraph(
        nodes=(
            Node(
                name=f"{name}.scale", letter="s", axes=("T", "1"),
                op=Scale(source=source, norm=norm),
                words=f"the divisor of each row in {which}", group="norm", layer=layer, wide=True,
                theirs=(f"{short}.hook_scale",), ends=ends, shown=True,
            ),
            Node(
                name=f"{name}.out", letter=letter, axes=("T", "D"),
                op=Normalize(source=source, norm=norm, weight=weights, bias=biased),
                words=out, group="norm", layer=layer, theirs=(f"{short}.hook_out", *theirs),
                aside=aside, ends=ends, wide=wide,
            ),
        ),
        parameters=norm_parameters(norm, name, f"{name}.out", "D", layer, which),
        absent=() if biased else (Absent(names=rf"{short}\.b$", why="it has no such bias"),),
    )  # fmt: skip


def norm_parameters(
    norm: NormConfig, name: str, makes: str, axis: str, layer: int | None, which: str
) -> tuple[Parameter, ...]:
    """`<name>.w` and `<name>.b`, if the norm has them, both with one axis."""
    found = (("w", f"weights of {which}"), ("b", f"bias of {which}"))
    return tuple(
        Parameter(
            name=f"{name}.{leaf}", axes=(axis,), makes=makes, words=words, kind="norms",
            letter=leaf, layer=layer,
        )
        for leaf, words in found
        if (norm.weights if leaf == "w" else norm.bias)
    )  # fmt: skip
