"""Normalization of the last axis: RMSNorm and LayerNorm."""

from __future__ import annotations

from llmcli.graph.node import Parameter, PartGraph
from llmcli.graph.ops import Scale
from llmcli.graph.rows import Rows
from llmcli.parts.norm.config import NormConfig

_ROWS = """
    scale  s  T 1  norm wide shown  the divisor of each row
    out    T  T D  norm             the rows, normalized
"""


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
    short, ends = name.rpartition(".")[2], layer is None
    r = Rows(name, _ROWS, layer=layer, kind="norms")
    r.node(
        "scale", Scale(source=source, norm=norm), words=f"the divisor of each row in {which}",
        theirs=(f"{short}.hook_scale",), ends=ends,
    )  # fmt: skip
    r.normalize(
        "out", source, norm, which, weights="", letter=letter, words=out, aside=aside, ends=ends,
        theirs=(f"{short}.hook_out", *theirs), wide=wide,
    )  # fmt: skip
    if not norm.bias:
        r.absent(rf"{short}\.b$", "it has no such bias")
    return r.graph()


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
