"""What `llmcli attention` asks of a model: from its options to the report and its views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmcli.cli.attention_files import Planned
from llmcli.cli.attention_options import MOST_DRAWN, HeadOptions, ViewOptions, metrics_named
from llmcli.cli.looking import token_texts
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.errors import UsageError
from llmcli.reports.attention import AttentionReport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.measure.attention.wanted import OnMatrix
    from llmcli.model import Model

MOST_CELLS = 480  # of a side of a matrix that is drawn: more than any terminal is wide


class Run:
    """What is asked of one model about one prompt, once both are known."""

    def __init__(
        self, model: Model, ids: tuple[int, ...], new: int, heads: HeadOptions, view: ViewOptions
    ) -> None:
        from llmcli.render.attention import COLOURED_BY
        from llmcli.render.stats import model_line
        from llmcli.reports.head_metrics import METRICS, MOST_RANKED, RANK, USUAL

        self.model, self.ids, self.new, self.heads, self.view = model, ids, new, heads, view
        self.title = model_line(model.describe())
        self.layers, chosen = heads.numbers(model.config)
        counts = {layer: model.config.layers[layer].mixer.heads for layer in self.layers}
        self.chosen = {
            layer: tuple(head for head in range(count) if chosen is None or head in chosen)
            for layer, count in counts.items()
        }
        self.mapped = () if view.map is None else metrics_named(view.map, METRICS, "--map")
        self.listed = (
            () if view.metrics is None else metrics_named(view.metrics, METRICS, "--metrics")
        )
        if len(self.mapped) > 1:
            raise UsageError("`--map` takes one metric", hint="--metrics takes several")
        asked = {metric.name for metric in (*self.mapped, *self.listed)}
        self.metrics = tuple(metric.name for metric in METRICS if metric.name in {*USUAL, *asked})
        self.coloured_by = self.mapped[0].name if self.mapped else COLOURED_BY
        self.tokens = len(ids) + new
        if self.tokens > MOST_RANKED and RANK in [metric.name for metric in self.mapped]:
            raise UsageError(
                f"`--map {RANK}` needs whole matrices: up to {MOST_RANKED} tokens, and there are "
                f"{self.tokens}"
            )
        self.drawn = view.draws(heads)
        if self.drawn:
            _check_drawn(self.chosen)

    def measured(self, on_matrix: OnMatrix | None, out: Output) -> AttentionReport:
        """One pass over the prompt, and what comes of it."""
        from llmcli.measure.attention import Drawn, measure_attention

        queries, keys = self.view.spans(self.tokens)
        with Progress(out) as progress:
            return measure_attention(
                self.model,
                self.ids,
                layers=self.layers,
                heads=sorted({head for heads in self.chosen.values() for head in heads}),
                what=self.heads.what,
                metrics=self.metrics,
                matrices=Drawn(queries=queries, keys=keys, most=MOST_CELLS) if self.drawn else None,
                pairs=self.view.top_pairs,
                pairs_by="weighted" if self.heads.weighted else "weight",
                everything=self.view.all_pairs,
                weighted=self.heads.weighted,
                generate=self.new,
                on_matrix=on_matrix,
                progress=progress,
            )

    def planned(self, kind: str) -> Planned:
        """The file that is asked for."""
        return Planned(
            file=str(self.view.save),
            kind=kind,
            name=self.model.name,
            title=self.title,
            what=self.heads.what,
            heads=self.chosen,
            windows={at: self.model.config.layers[at].mixer.window for at in self.layers},
            known=token_texts(self.model, self.ids),
            new=self.new,
            drawn=self.drawn,
            scale=self.view.scale,
            metric=self.coloured_by,
            metrics=len(self.metrics),
            force=self.view.force,
        )

    def views(self, report: AttentionReport) -> list[RenderableType]:
        """What is shown of the report, in the order of the options."""
        from llmcli.render.attention import heatmaps, metric_map, overview
        from llmcli.render.attention_tables import metric_table, pair_table

        known = {metric.name for metric in report.metrics}
        shown: list[RenderableType] = []
        if self.drawn:
            kind = self.view.scale or ("sqrt" if report.what == "pattern" else "linear")
            shown.append(heatmaps(report, kind))
        shown += [
            metric_map(report, metric, self.view.scale or "linear")
            for metric in self.mapped
            if metric.name in known
        ]
        if listed := [metric for metric in self.listed if metric.name in known]:
            shown.append(metric_table(report, listed))
        if self.view.top_pairs:
            shown.append(pair_table(report, everything=self.view.all_pairs))
        return shown or [overview(report)]


def _check_drawn(chosen: Mapping[int, tuple[int, ...]]) -> None:
    count = sum(map(len, chosen.values()))
    if count > MOST_DRAWN:
        raise UsageError(
            f"those are {count} matrices, and at most {MOST_DRAWN} are drawn",
            hint="name fewer with --layer and --head, or see all heads with --map METRIC",
        )
    if not count:
        raise UsageError("none of these layers has such a head")
