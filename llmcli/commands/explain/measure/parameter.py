"""A parameter's number: nothing is computed, so what is told is where it comes from."""

from __future__ import annotations

from llmcli.anatomy.graph import graph
from llmcli.commands.explain.measure.index import shape_in_letters, where
from llmcli.commands.explain.measure.names import Axes
from llmcli.graph.evaluation.rule import symbol
from llmcli.model import Model
from llmcli.observe.kernel import origin
from llmcli.reports.explanation import Step


def parameter_step(model: Model, axes: Axes, index: tuple[int, ...]) -> Step:
    """The number of a weight with the tensor of the checkpoint that holds it."""
    turned = graph(model.config).parameters[axes.name].turned
    *row, last = (*index[:-2], *index[:-3:-1]) if turned else index
    stored = model.decoder.weight(axes.name)
    if row:  # of a matrix in blocks no more than the row is dequantized
        value = float(stored.dense(rows=slice(row[0], row[0] + 1))[(0, *row[1:], last)])
    else:
        value = float(stored.dense()[last])
    letter = axes.name.rpartition(".")[2]
    if letter == "W":  # of a table
        letter = graph(model.config).letter(axes.name)
    return Step(
        number=1,
        name=axes.name,
        index=index,
        symbol=symbol(letter, *index),
        formula=f"{letter} was learned",
        shape=shape_in_letters(axes),
        where=where(axes, index, (), model.tokenizer),
        source="weights",
        value=value,
        kernel=value,
        difference=0.0,
        tolerance=0.0,
        ok=True,
        note=origin(model, axes.name),
    )


