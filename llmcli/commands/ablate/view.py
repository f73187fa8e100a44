"""Ablations: the parts that matter most in words, and a map of all; also as page and PNG."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.ablate.report import AblateReport, Effect
from llmcli.records.numbers import counted
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Line, in_words
from llmcli.ui.maps import DIGITS, Map, beside, draw_map, map_png, on_page, signed
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink
from llmcli.ui.theme import HEADING, one_line

AROUND = 7  # lines of a screen beside the rows of the map and the parts in words
LEAST = 4  # rows of a map at least
INSIDE = ("head", "expert")  # kinds of which a layer has many
BY = {"mean": "its mean", "zero": "zero", "resample": "its values in another prompt"}


def effects_map(report: AblateReport) -> Map:
    """Layers across; heads down, the strongest expert, what else is added, the whole layer."""
    outside = any(one.layer is None for one in report.effects)
    columns = [*["–"] * outside, *map(str, range(report.layers))]
    heads: dict[int, list[Effect]] = {}
    found: dict[str, dict[int, float]] = {}
    for one in report.effects:
        at = 0 if one.layer is None else one.layer + outside
        row = one.kind if one.index is None else f"{one.kind} {one.index}"
        if one.kind == "head":  # those of two mixers side by side follow one another
            heads.setdefault(at, []).append(one)
            row = f"head {len(heads[at]) - 1}"
        elif one.kind == "expert":
            row = "top expert"
        own = found.setdefault(row, {})
        own[at] = max(own.get(at, 0.0), one.value, key=abs)
    order = {**dict.fromkeys(found, 2), "top expert": 1, "layer": 3}
    names = sorted(found, key=lambda row: 0 if row.startswith("head ") else order[row])
    apart = [name for name in names if order[name] > 1 and not name.startswith("head ")]
    apart = apart if len(apart) < len(names) else []
    values = [[found[name].get(at, np.nan) for at in range(len(columns))] for name in names]
    return Map(
        title=f"effect on the {report.metric}", names=names, columns=columns,
        values=np.array(values), numbered=sum(name.startswith("head ") for name in names),
        apart=len(apart), apart_title=", ".join(apart),
    )  # fmt: skip


def render_ablation(
    report: AblateReport, title: str, *, top: int, height: int | None = None, whole: str = ""
) -> RenderableType:
    """What the number is, the parts that matter most in words, and the map of all.

    `title` is the model's line. `height`: of the screen in lines; a row of the map then stands for
    several heads. `whole` names the option that shows all.
    """
    shown, of = Fit(lambda width, ink: _strongest(report, top, width, ink)), effects_map(report)
    most = None if height is None else max(LEAST, height - AROUND - -(-top // 2))
    if most is not None and len(of.names) > most:
        most = max(LEAST, most - 2)  # and two lines that say so
    drawn = Fit(lambda width, ink: draw_map(of, most, whole, width, ink))
    heading = Text(one_line(title), style=HEADING)
    return Group(heading, Line(list(_headline(report))), shown, drawn)


def _headline(report: AblateReport) -> Iterator[str]:
    """The number without an ablation, and what the effects are."""
    words = "loss" if report.metric == "loss" else "logit of " + (
        "each prompt's top token" if report.answer is None else in_words(report.answer)
    )
    versus = "" if report.versus is None else f" − {in_words(report.versus)}"
    yield f"{words}{versus} {number(report.value, 5)}{' nats' * (report.metric == 'loss')}"
    yield counted(report.prompts, "prompt") if report.tokens is None else (
        counted(len(report.tokens), "token")
    )
    yield f"{BY[report.by]} in place of each part"
    if report.prompts > 1:
        yield "95 % intervals"


def _strongest(report: AblateReport, top: int, width: int, ink: Ink) -> Iterator[RenderableType]:
    """The `top` strongest: heads and experts on the left, what has these on the right."""
    sides = [
        [f"{signed(one.value):>8}{_interval(one)}  {effect_words(report, one)}" for one in side]
        for side in (
            [one for one in strongest(report) if (one.kind in INSIDE) == inside]
            for inside in (True, False)
        )
    ]
    sides = [side for side in sides if side]
    most = -(-top // len(sides))
    yield from beside([side[:most] for side in (*sides, [])[:2]], width, ink)


def strongest(report: AblateReport) -> list[Effect]:
    """All effects, the largest first."""
    return sorted(report.effects, key=lambda one: -abs(one.value))


def _interval(one: Effect) -> str:
    return "" if one.high is None else f" ±{number(one.high - one.value)}"


def effect_words(report: AblateReport, one: Effect) -> str:
    """`layer 3 head 2`, `layer 3 expert 17`, `layer 3 mlp`, `layer 3`."""
    mixer = one.name.split(".")[-2] if one.kind == "head" else "attn"
    kind = one.kind if mixer == "attn" else f"{mixer} {one.kind}"
    words = [f"layer {one.layer}"] * (one.layer is not None) + [kind] * (one.kind != "layer")
    return " ".join([*words, *[str(one.index)] * (one.index is not None)])


# files


def ablation_page(report: AblateReport, title: str) -> bytes:
    """The map and the strongest parts as one HTML file. `title` names the model."""
    data = {
        "heading": "Ablation",
        "terms_heading": "The strongest effects",
        "note": "Red: the number grows without that part; blue: it falls. What is no head or "
        "expert has a scale of its own.",
        "title": f"{title} · {report.dtype}",
        "words": list(_headline(report)),
        "tokens": [token(one) for one in report.tokens or ()],
        "corrupted": [],
        "maps": [on_page(effects_map(report))],
        "terms": [
            [effect_words(report, one) + _interval(one), finite(one.value, DIGITS)]
            for one in strongest(report)[:100]
        ],
        "checks": checks(report.checks),
    }
    return page("maps", f"Ablation: {title}", data)


def ablation_png(report: AblateReport, title: str) -> bytes:
    """The map as a PNG file, and the strongest parts in the footer. `title` names the model."""
    of = effects_map(report)
    parts = (f"{effect_words(report, one)} {signed(one.value)}" for one in strongest(report)[:5])
    heading = f"Ablation: {' · '.join(_headline(report))}"
    apart = f"; {of.apart_title} up to {number(of.scale_apart.high)}" if of.apart else ""
    return map_png(of, heading, title, f"{of.title}{apart}; {', '.join(parts)}", report.ok)
