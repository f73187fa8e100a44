"""Options of `llmcli attention`: which heads, what of them is shown, and where files go.

They are the request that measurement, files and views read. What makes no sense is refused before
any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.records.attention import (
    COLOURED_BY,
    LEARNED_SINK,
    LINEAR,
    METRICS,
    MOST_RANKED,
    OVERWRITTEN,
    RANK,
    USUAL,
    Metric,
    What,
)
from llmcli.records.numbers import did_you_mean, spans
from llmcli.shell.inspection import FORCE, FileOptions, check_span, parse_numbers, parse_span
from llmcli.shell.params import opt

if TYPE_CHECKING:
    from llmcli.config.model import ModelConfig

Span = tuple[int, int]  # positions `first` … `last`-1
FILES = ("safetensors", "npz", "json", "html", "png")
MOST_DRAWN = 12  # matrices on one screen
OF_MAPS = ("map", "metrics", "top_pairs", "query", "key", "scale", "patterns", "open")
HAS = {  # what layers have, and why others do not
    "pattern": ("attention to look at", ""),
    "scores": ("scores", ": no softmax makes its weights of any"),
    "state": ("a state", ": softmax attention keeps keys and values"),
}
_view = partial(opt, panel="View")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(FileOptions):
    """Which heads, and what is shown of them: by default the map, or the named heads' matrices.

    A single head is always drawn, beside anything else that is shown.
    """

    panel: ClassVar[str] = "Heads"
    layer: str | None = opt(None, "--layer LAYERS", "Layers such as 0,3-5,-1. [default: all]")
    head: str | None = opt(
        None, "--head HEADS", "Heads of these layers, such as 2 or 0-3. [default: all]"
    )
    what: Literal["pattern", "scores", "state"] = opt(
        "pattern",
        "--what pattern|scores|state",
        "What the matrices show: attention weights, or the scores before softmax. Metrics and "
        "pairs always use the weights. `state`: norm and effective rank over time of the "
        "recurrent states of gated DeltaNet and Mamba-2 layers.",
    )
    synthetic: int | None = opt(
        None,
        "--synthetic N",
        "Instead of a text, N random tokens and the same N again (32 is plenty), which reveals "
        "induction and duplicate-token heads. --seed (default 0 here) draws other tokens.",
        at_least=2,
        at_most=100_000,
        excludes=("PROMPT", "--file", "--ids", "--chat", "--system", "--set"),
    )
    query: str | None = _view(
        None,
        "--query SPAN",
        "Only these rows of the matrices, and pairs of these queries: 40:80, :10 or -5:.",
    )
    key: str | None = _view(
        None,
        "--key SPAN",
        "Only these columns of the matrices, and pairs of these keys.",
    )
    scale: Literal["linear", "sqrt", "log"] | None = _view(
        None,
        "--scale linear|sqrt|log",
        "How values become colours. [default: sqrt for weights, else linear]",
    )
    map: str | None = _view(
        None,
        "--map METRIC",
        "One metric of every head, as a map of layers and heads.",
    )
    metrics: str | None = _view(
        None,
        "--metrics all|A,B",
        "A table of metrics, a row for each head; for a single head, a line for each metric.",
    )
    top_pairs: int = _view(
        0,
        "--top-pairs N",
        "The N largest weights (within --query and --key), without the first key and the token "
        "itself.",
        at_least=0,
        at_most=10_000,
    )
    patterns: bool = _view(
        False, "--patterns", "With --json: include the matrices.", needs=("--json",)
    )
    save: str | None = _view(
        None,
        "-o --output FILE",
        f"Also write the heads to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = _view(
        False,
        "--open",
        "Open the .html or .png of -o in a browser; without -o, a page with every head.",
    )
    force: bool = _view(False, *FORCE, needs=("--output", "--open", "--patterns"))

    @property
    def matrices(self) -> What:
        """What matrices hold; with `state` there are none."""
        return "scores" if self.what == "scores" else "pattern"

    @property
    def zoomed(self) -> bool:
        """Whether a part of the queries or keys is requested."""
        return self.query is not None or self.key is not None

    @property
    def draws(self) -> bool:
        """Whether matrices are requested: of a single head, or of named ones and nothing else."""
        if all(re.fullmatch(r"\s*-?\d+\s*", text or "") for text in (self.layer, self.head)):
            return True
        listed = self.map is not None or self.metrics is not None or self.top_pairs > 0
        return not listed and (self.layer is not None or self.head is not None)

    def drawn(self, heads: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether the matrices of these heads are drawn: they may be too many."""
        return self.draws and sum(map(len, heads.values())) <= MOST_DRAWN

    @property
    def mapped(self) -> Metric | None:
        """The metric of `--map`. Raises UsageError for an unknown one, and for several."""
        found = () if self.map is None else metrics_named(self.map, "--map")
        if len(found) > 1:
            raise UsageError("`--map` takes one metric", hint="--metrics takes several")
        return found[0] if found else None

    @property
    def table(self) -> tuple[Metric, ...]:
        """The metrics of `--metrics`. Raises UsageError for unknown ones."""
        return () if self.metrics is None else metrics_named(self.metrics, "--metrics")

    @property
    def computed(self) -> tuple[str, ...]:
        """The metrics that one pass over the rows gives, and those that are named besides."""
        names = {*USUAL, *(metric.name for metric in self._named)}
        return tuple(metric.name for metric in METRICS if metric.name in names)

    @property
    def _named(self) -> tuple[Metric, ...]:
        return (*filter(None, [self.mapped]), *self.table)

    @property
    def coloured_by(self) -> str:
        """The metric of the map of all heads."""
        return COLOURED_BY if self.mapped is None else self.mapped.name

    @property
    def matrix_scale(self) -> Literal["linear", "sqrt", "log"]:
        """How the numbers of matrices become colours."""
        return self.scale or ("sqrt" if self.what == "pattern" else "linear")

    def check(self) -> None:
        """Raises UsageError for options that have nothing to act on, and for unknown metrics."""
        for name in OF_MAPS if self.what == "state" else ():
            if getattr(self, name):
                raise UsageError(
                    f"`--{name.replace('_', '-')}` is about maps of tokens, and `--what state` "
                    "shows states",
                    hint="leave one of them out",
                )
        mapped, _ = self.mapped, self.table
        for span, option in ((self.query, "--query"), (self.key, "--key")):
            if span is not None:
                check_span(span, option)
        if self.zoomed and not (self.draws or self.top_pairs):
            shown = self.layer is not None or self.head is not None
            raise UsageError(
                f"`--{'query' if self.query is not None else 'key'}` is a part of a head's matrix, "
                f"and {'none is shown' if shown else 'no head is named'}",
                hint="add --layer and --head, or `--top-pairs 20` for pairs of that part",
            )
        matrices = self.draws or self.save is not None or self.open
        if self.what == "scores" and not (matrices or self.patterns):
            raise UsageError(
                "`--what scores` is about matrices, and none is shown",
                hint="add --layer and --head",
            )
        if self.scale is not None and not (matrices or mapped):
            raise UsageError(
                "`--scale` is for matrices and `--map`, and none is shown",
                hint="add --layer and --head, or `--map METRIC`",
            )

    def check_model(self, config: ModelConfig) -> None:
        """Raises UsageError for what the model does not have, and for too many matrices to draw."""
        for name, why in unknown_metrics(config).items():
            if name in {one.name for one in self._named} and len(self.table) < len(METRICS):
                raise UsageError(f"`{name}`: {why}")
        chosen = self.heads_of(config)
        written = (self.save is not None or self.open) and not self.zoomed
        if self.draws and not written and not self.drawn(chosen):
            raise UsageError(
                f"{sum(map(len, chosen.values()))} heads selected; at most {MOST_DRAWN} can be "
                "drawn",
                hint="name fewer with --layer and --head, or see all heads with `--map METRIC`",
            )

    def heads_of(self, config: ModelConfig) -> dict[int, tuple[int, ...]]:
        """The chosen heads of each chosen layer, in order.

        With `--what state` all layers are those with a state. Raises UsageError for layers without
        `what`, and for heads that none of them has.
        """
        from llmcli.graph.graph import graph

        mixers, counts = graph(config).mixers, head_counts(self.what, config)
        scores, (what, why) = self.what == "scores", HAS[self.what]
        if not counts:
            hint = "use `--what pattern`" if scores else "`llmcli info` says what it has"
            raise UsageError(f"no layer of this model has {what}{why}", hint=hint)
        layers = tuple(counts if self.what == "state" else mixers)
        if self.layer is not None:
            layers = parse_numbers(self.layer, len(config.layers), "--layer", "layers")
        for layer in layers:
            if layer not in counts:
                why = why if layer in mixers else ": it does not mix tokens"
                others = "; others have `--what pattern`" * scores
                raise UsageError(
                    f"layer {layer} has no {what.removeprefix('a ')}{why}",
                    hint=f"layers that have: {spans(tuple(counts))}{others}",
                )
        most = max(counts[layer] for layer in layers)
        numbers: Sequence[int] = range(most)
        if self.head is not None:
            numbers = sorted(parse_numbers(self.head, most, "--head", "heads"))
        return {
            layer: tuple(head for head in numbers if head < counts[layer])
            for layer in sorted(layers)
        }

    def check_tokens(self, count: int) -> None:
        """Raises UsageError for spans without tokens, and for a map of ranks of too many tokens."""
        if self.coloured_by == RANK and count > MOST_RANKED:
            raise UsageError(
                f"`--map {RANK}` needs whole matrices: up to {MOST_RANKED} tokens, and there are "
                f"{count}"
            )
        self.part(count)

    def part(self, count: int) -> tuple[Span, Span]:
        """The requested queries and keys of `count` tokens: all, unless a span is given.

        Raises UsageError for spans without tokens.
        """
        return parse_span(self.query, count, "--query"), parse_span(self.key, count, "--key")


def head_counts(what: str, config: ModelConfig) -> dict[int, int]:
    """How many heads each layer has that has a `pattern`, `scores` or a `state`."""
    from llmcli.graph.graph import graph
    from llmcli.graph.ops import Mix

    model, found = graph(config), {}
    for layer, node in model.mixers.items():
        mix = node.op if isinstance(node.op, Mix) else None
        has = {"scores": mix and model.score(mix), "state": mix and mix.state}
        if has.get(what, True):
            found[layer] = model.sizes(layer)["H"]
    return found


def metrics_named(text: str, option: str) -> tuple[Metric, ...]:
    """`all`, or names separated by commas (`-` is as `_`); raises UsageError for others."""
    by_name = {metric.name: metric for metric in METRICS}
    found: dict[str, Metric] = {}
    for name in (part.strip().replace("-", "_") for part in text.split(",")):
        if name == "all":
            found |= by_name
        elif name not in by_name:
            near = get_close_matches(name, by_name, 3, 0.5)
            raise UsageError(
                f"`{option}`: there is no metric `{name}`",
                hint=did_you_mean(near, f"the metrics are {', '.join(by_name)}"),
            )
        else:
            found[name] = by_name[name]
    return tuple(found.values())


def unknown_metrics(config: ModelConfig) -> dict[str, str]:
    """The metrics that no head of the model has, and why."""
    from llmcli.graph.graph import graph
    from llmcli.graph.recurrence import LinearMap

    found = {}
    mixers = (layer.attention for layer in config.layers)
    if not any(mixer is not None and mixer.scores.sinks for mixer in mixers):
        found[LEARNED_SINK] = "no head of this model has a learned sink"
    model = graph(config)
    sources = (model[node.op.inputs[0]].op for node in model.mixers.values())
    # their map is the equivalent of a recurrence: its weights have signs
    recurrences = [op.of for op in sources if isinstance(op, LinearMap)]
    if not recurrences:
        found |= dict.fromkeys(LINEAR, "no head of this model has a state in place of a softmax")
    elif all(recurrence.plain for recurrence in recurrences):
        found[OVERWRITTEN] = "no head of this model takes anything off its state"
    return found
