"""A parameter's number: nothing is computed, so what is told is where it comes from."""

from __future__ import annotations

from llmcli.anatomy.graph import graph
from llmcli.explain.index import shape_in_letters, where
from llmcli.explain.names import Axes
from llmcli.graph.evaluation.rule import symbol
from llmcli.model import Model
from llmcli.reports.explanation import Step
from llmcli.reports.numbers import together


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


def origin(model: Model, parameter: str) -> str:
    """Which tensor of the checkpoint a parameter was read from, and what was done to it."""
    if model.random_seed is not None:
        return f"drawn at random with the seed {model.random_seed}"
    entries = [entry for entry in model.ledger.entries if entry.target == parameter]
    if not entries:
        return "read from the checkpoint"
    entry, source = entries[0], together([entry.source for entry in entries])
    words = f"from the checkpoint's `{source}`, stored as {entry.stored}"
    if entry.dequantized:
        words += " and dequantized"
    return words + (f" ({', '.join(entry.words)})" if entry.words else "")
