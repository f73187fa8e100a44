"""The table of names: place, meaning, axes, formula, and what others call the same. No torch."""

from __future__ import annotations

from llmcli.anatomy.fold import fold_kinds, numbered
from llmcli.anatomy.graph import graph
from llmcli.anatomy.names import Names
from llmcli.commands.shapes.measure.tensors import Asked, Calls
from llmcli.commands.shapes.report import NameRow
from llmcli.families.sources import sources


def name_rows(calls: Calls, asked: Asked) -> tuple[NameRow, ...]:
    """A row for each name that is asked for, those of repeated layers in one.

    In the order of execution, parameters first and states last.
    """
    config = calls.config
    known = Names(config, sources(config))
    tensors = [item for item in calls.tensors(("prefill",)) if asked.takes(item[0])]
    rows = []
    for row in fold_kinds(tensors, config, lambda spec: None):
        spec = row.phases[0]
        others = known.aliases(spec.name)
        if spec.layer is not None and len(row.layers) > 1:
            others = tuple(_unnumbered(alias, spec.layer) for alias in others)
        rows.append(
            NameRow(
                name=row.name,
                kind=spec.kind,
                axes=spec.axes,
                shape=spec.shape,
                documents=calls.letters("prefill").documented(spec.axes, spec.layer),
                words=graph(config).words(spec.name),
                formula=row.formula,
                aliases=others,
            )
        )
    return tuple(rows)


def _unnumbered(alias: str, layer: int) -> str:
    """`{i}` for the layer's number, which stands between dots or, in a short name, inside: `k6`."""
    if "." in alias:
        return numbered(alias, layer, "{i}")
    return alias.replace(str(layer), "{i}", 1)
