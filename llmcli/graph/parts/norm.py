"""Normalization of the last axis: RMSNorm and LayerNorm."""

from __future__ import annotations

from typing import Any

from llmcli.config.norm import NormConfig
from llmcli.graph.node import PartGraph
from llmcli.graph.ops import Scale
from llmcli.graph.rows import Rows

_ROWS = """
    scale  s  T 1  norm wide tap_only  the divisor of each row
    out    T  T D  norm             the rows, normalized
"""


def norm_graph(
    norm: NormConfig,
    name: str,
    letter: str,
    source: str,
    words: tuple[str, str],
    *,
    layer: int | None,
    wide: bool = False,
) -> PartGraph:
    """`<name>.scale` `[T, 1]`, the divisor, and `<name>.out` `[T, D]`.

    `letter`: symbol of the output. `words`: descriptions of the norm and the output. `wide`: the
    output is part of the stream.
    """
    which, out = words
    ends = layer is None
    r = Rows(name, _ROWS, "norms", layer=layer)
    divisor = f"the divisor of each row in {which}"
    r.node("scale", Scale(source=source, norm=norm), words=divisor, ends=ends)
    how: dict[str, Any] = {"letter": letter, "words": out, "wide": wide}
    r.normalize("out", source, norm, which, prefix="", ends=ends, **how)
    return r.graph()
