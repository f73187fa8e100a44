"""`llmcli attention --what state`: what mixers with a state remember over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.anatomy.graph import graph
from llmcli.commands.attention.options import HeadOptions, ViewOptions
from llmcli.commands.attention.prompt import Reading
from llmcli.errors import UsageError
from llmcli.graph.ops import Mix
from llmcli.records.numbers import spans
from llmcli.shell.inspection import Inspection
from llmcli.shell.looking import parse_numbers
from llmcli.shell.progress import Progress

if TYPE_CHECKING:
    from llmcli.config import ModelConfig

FILES = ("json",)


def check_options(heads: HeadOptions, view: ViewOptions) -> None:
    """Raises UsageError for what is about maps."""
    given = {
        "--map": view.map, "--metrics": view.metrics, "--top-pairs": view.top_pairs,
        "--query": view.query, "--key": view.key, "--scale": view.scale,
        "--patterns": view.patterns, "--open": view.open,
    }  # fmt: skip
    for option, value in given.items():
        if value:
            raise UsageError(
                f"`{option}` is about maps of tokens, and `--what state` shows states",
                hint="leave one of them out",
            )


def chosen(heads: HeadOptions, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The requested layers and heads. Raises UsageError for those without a state."""
    model = graph(config)
    states = [
        layer for layer, node in model.mixers.items()
        if isinstance(node.op, Mix) and node.op.state
    ]  # fmt: skip
    if not states:
        raise UsageError(
            "no layer of this model has a state: softmax attention keeps keys and values",
            hint="`llmcli info` says what it has",
        )
    layers = tuple(states)
    if heads.layer is not None:
        layers = parse_numbers(heads.layer, len(config.layers), "--layer", "layers")
        if without := [layer for layer in layers if layer not in states]:
            mixes = without[0] in model.mixers
            what = "softmax attention keeps keys and values" if mixes else "it is none"
            raise UsageError(
                f"layer {without[0]} has no state: {what}",
                hint=f"layers that have: {spans(states)}",
            )
    count = max(model.sizes(layer)["H"] for layer in layers)
    numbers = tuple(range(count))
    if heads.head is not None:
        numbers = parse_numbers(heads.head, count, "--head", "heads")
    return tuple(sorted(layers)), numbers


def show(look: Inspection, reading: Reading, heads: HeadOptions) -> None:
    """Measures the states, writes the requested file, and shows them."""
    from llmcli.commands.attention.view.states import render_states

    layers: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def check(config: ModelConfig) -> None:
        nonlocal layers, numbers
        layers, numbers = chosen(heads, config)

    model = look.load(reading.model, check, text=reading.is_text)
    ids = reading.ids(model)

    from llmcli.commands.attention.measure.states import measure_states

    with Progress(look.out) as progress:
        report = measure_states(
            model, ids, layers=layers, heads=numbers, generate=reading.new.generate,
            progress=progress,
        )  # fmt: skip
    file = look.file(f"states of layers {spans(layers)}", {})
    look.present(lambda: render_states(report, look.title), report, file)
