"""What `llmcli attention` asks of a model: from its options to the report and its views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.cli.looking import token_texts
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.commands.attention.files import Planned
from llmcli.commands.attention.options import HeadOptions, ViewOptions
from llmcli.commands.attention.report.heads import AttentionReport
from llmcli.commands.attention.report.metrics import METRICS, MOST_RANKED, RANK, USUAL
from llmcli.commands.attention.request import Asked
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.commands.attention.measure.wanted import OnMatrix
    from llmcli.commands.attention.view.screen import Calls
    from llmcli.model import Model
    from llmcli.ui.palette import Kind

MOST_CELLS = 480  # of a side of a matrix that is drawn: more than any terminal is wide


class Run:
    """What is asked of one model about one prompt, once both are known."""

    def __init__(
        self,
        model: Model,
        ids: tuple[int, ...],
        new: int,
        heads: HeadOptions,
        view: ViewOptions,
        asked: Asked,
    ) -> None:
        from llmcli.commands.attention.measure.run import unknown_metrics
        from llmcli.commands.attention.view.screen import COLOURED_BY
        from llmcli.ui.stats import model_line

        self.model, self.ids, self.new, self.heads, self.view = model, ids, new, heads, view
        self.title = model_line(model.describe())
        self.chosen = asked.heads(heads, model.config)
        self.asked = asked.fitting(self.chosen)
        names = {metric.name for metric in asked.table} | ({asked.map.name} if asked.map else set())
        self.metrics = tuple(metric.name for metric in METRICS if metric.name in {*USUAL, *names})
        named = {*names} if len(asked.table) < len(METRICS) else set()
        for name, why in unknown_metrics(model.config).items():
            if name in named:
                raise UsageError(f"`{name}`: {why}")
        self.coloured_by = asked.map.name if asked.map else COLOURED_BY
        self.tokens = len(ids) + new
        self.spans = view.spans(self.tokens)
        if asked.map and asked.map.name == RANK and self.tokens > MOST_RANKED:
            raise UsageError(
                f"`--map {RANK}` needs whole matrices: up to {MOST_RANKED} tokens, and there are "
                f"{self.tokens}"
            )

    def measured(self, on_matrix: OnMatrix | None, out: Output) -> AttentionReport:
        """One pass over the prompt, and what comes of it. Raises UsageError for empty spans."""
        from llmcli.commands.attention.measure.run import measure_attention
        from llmcli.commands.attention.measure.wanted import Drawn

        queries, keys = self.spans
        drawn = Drawn(queries=queries, keys=keys, most=MOST_CELLS) if self.asked.drawn else None
        with Progress(out) as progress:
            report = measure_attention(
                self.model,
                self.ids,
                layers=tuple(self.chosen),
                heads=sorted({head for heads in self.chosen.values() for head in heads}),
                what=self.heads.matrices,
                metrics=self.metrics,
                matrices=drawn,
                pairs=self.view.top_pairs,
                pairs_by="weighted" if self.heads.weighted else "weight",
                pairs_within=self.spans if self.view.zoomed else None,
                everything=self.view.all_pairs,
                weighted=self.heads.weighted,
                generate=self.new,
                on_matrix=on_matrix,
                progress=progress,
            )
        self._check_written(len(report.tokens))
        return report

    def _check_written(self, tokens: int) -> None:
        """Spans are told before it is known where the model ends its text."""
        for name, (first, _) in zip(("query", "key"), self.spans, strict=True):
            if first >= tokens:
                raise UsageError(
                    f"`--{name} {getattr(self.view, name)}` has no token in it: the model ended "
                    f"its text after {tokens - len(self.ids)} of {self.new} tokens",
                    hint=f"positions go from 0 to {tokens - 1}",
                )

    @property
    def scale(self) -> Kind:
        """How the values of matrices become colours."""
        return self.view.scale or ("sqrt" if self.heads.matrices == "pattern" else "linear")

    def planned(self, kind: str) -> Planned:
        """The file that is asked for."""
        from llmcli.commands.attention.measure.run import of_recurrences, part_name

        return Planned(
            file=str(self.view.save),
            kind=kind,
            name=self.model.name,
            title=self.title,
            what=self.heads.matrices,
            dtype="float64" if str(self.model.dtype) == "torch.float64" else "float32",
            heads=self.chosen,
            windows={at: self.model.config.layers[at].window for at in self.chosen},
            signed=frozenset(of_recurrences(self.model.config)),
            parts={at: part_name(self.model.config, at) for at in self.chosen},
            known=token_texts(self.model, self.ids),
            new=self.new,
            drawn=self.asked.drawn,
            scale=self.view.scale,
            metric=self.coloured_by,
            metrics=len(self.metrics),
            force=self.view.force,
        )

    def views(self, report: AttentionReport, calls: Calls) -> list[RenderableType]:
        """What is shown of the report, in the order of the options."""
        from rich.console import Group

        from llmcli.commands.attention.view.head import head_kinds, head_numbers, is_single
        from llmcli.commands.attention.view.screen import heatmaps, metric_map, overview
        from llmcli.commands.attention.view.tables import metric_table, pair_table

        known = {metric.name for metric in report.metrics}
        table = [metric for metric in self.asked.table if metric.name in known]
        shown: list[RenderableType] = []
        if self.asked.drawn:
            shown.append(heatmaps(report, self.scale))
            if is_single(report):
                numbers = [] if table else [head_numbers(report)]
                shown.append(Group(head_kinds(report), *numbers))
        if self.asked.map:
            shown.append(metric_map(report, self.asked.map, self.view.scale or "linear"))
        if table:
            shown.append(metric_table(report, table))
        if self.view.top_pairs:
            spans = self.spans if self.view.zoomed else None
            shown.append(pair_table(report, everything=self.view.all_pairs, spans=spans))
        return shown or [overview(report, calls)]
