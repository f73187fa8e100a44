"""Attribution: the strongest terms in words, and a map of all, in the terminal, as page and PNG."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attribute.report import AttributeReport
from llmcli.records.contribution import Contribution
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Line, in_words
from llmcli.ui.maps import DIGITS, Map, beside, draw_map, map_png, on_page, signed
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink
from llmcli.ui.theme import HEADING, one_line

AROUND = 10  # lines of a screen beside the rows of the map and the terms in words
LEAST = 4  # rows of a map at least
ROWS = {"expert": "mlp", "shared expert": "mlp", "mlp": "mlp"}
WORDS = {"embed": "token embedding", "pos_embed": "position embedding"}
PLACES = {"resid_pre": "the stream before each layer", "head": "heads, all positions"}


def maps(report: AttributeReport) -> list[Map]:
    """The maps of a report: layers across; heads down, or positions."""
    if report.method == "direct":
        return [_terms_map(report)]
    kinds = dict.fromkeys(term.kind for term in report.terms)
    return [_places_map(report, kind) for kind in kinds]


def _terms_map(report: AttributeReport) -> Map:
    """Heads, feed-forward, all else, and the sum so far; embeddings come first, the head last."""
    last = max((t.layer for t in report.terms if t.layer is not None), default=-1)
    ends = any(term.layer is None and term.kind != "embedding" for term in report.terms)
    columns = ["in", *map(str, range(last + 1)), *(["out"] if ends else [])]
    heads: list[dict[tuple[str, int | None], int]] = [{} for _ in columns]
    found: dict[tuple[str, int], float] = {}
    for term in report.terms:
        at = term.layer + 1 if term.layer is not None else -1 if term.kind != "embedding" else 0
        at %= len(columns)
        row = ROWS.get(term.kind, "other")
        if term.kind == "head":  # those of two mixers side by side follow one another
            row = f"head {heads[at].setdefault((term.name, term.index), len(heads[at]))}"
        found[row, at] = found.get((row, at), 0.0) + term.value
    names = [f"head {head}" for head in range(max(map(len, heads)))]
    names += [name for name in ("mlp", "other") if any(row == name for row, _ in found)]
    values = np.full((len(names) + 1, len(columns)), np.nan)
    for (row, at), value in found.items():
        values[names.index(row), at] = value
    values[-1] = np.nansum(values[:-1], axis=0).cumsum()
    title = "what each part of each layer adds"
    return Map(title=title, names=[*names, "so far"], columns=columns, values=values, apart=1,
               apart_title="so far: their sum")  # fmt: skip


def _places_map(report: AttributeReport, kind: str) -> Map:
    """Positions down; of heads, these, all positions together."""
    terms = [term for term in report.terms if term.kind == kind]
    down = [term.index if kind == "head" else term.position for term in terms]
    values = np.full((max(filter(None, down), default=0) + 1, report.layers), np.nan)
    for row, term in zip(down, terms, strict=True):
        assert row is not None
        assert term.layer is not None
        before = values[row, term.layer]
        values[row, term.layer] = term.value + (0.0 if np.isnan(before) else before)
    names = [f"head {row}" for row in range(len(values))]
    if kind != "head":
        names = [f"{at} {_differs(report, at)}" for at in range(len(values))]
    title = PLACES.get(kind, f"{kind} of each layer")
    return Map(title=title, names=names, columns=[*map(str, range(report.layers))], values=values)


def _differs(report: AttributeReport, at: int) -> str:
    clean, other = report.tokens[at], (report.corrupted or report.tokens)[at]
    return in_words(clean) if clean.id == other.id else f"{in_words(clean)}≠{in_words(other)}"


def render_attribution(
    report: AttributeReport, title: str, *, top: int, height: int | None = None, whole: str = ""
) -> RenderableType:
    """What the number is, its strongest terms in words, and the map of all.

    `title` is the model's line. `height`: of the screen in lines; a row of the map then stands for
    several heads, or only the strongest positions are there. `whole` names the option that shows
    all.
    """
    shown = Fit(lambda width, ink: _strongest(report, top, width, ink))
    most = None if height is None else max(LEAST, height - AROUND - -(-top // 2))
    drawn = Fit(lambda width, ink: draw_map(maps(report)[0], most, whole, width, ink))
    heading = Text(one_line(title), style=HEADING)
    return Group(heading, Line(list(_headline(report))), shown, drawn)


def _headline(report: AttributeReport) -> Iterator[str]:
    """The number, and how the terms make it up."""
    at = len(report.tokens) - 1
    after = f"after {in_words(report.tokens[-1])} at {at}"
    if report.answer is None:
        yield f"{report.number}[{','.join(map(str, report.index or ()))}] {after}"
    else:
        versus = "" if report.versus is None else f" − {in_words(report.versus)}"
        yield f"logit of {in_words(report.answer)}{versus} {after}"
    if report.method == "direct":
        yield f"{number(report.value, 5)} = Σ {number(report.sum, 5)} of {len(report.terms)} terms"
        if report.number == "logits_raw":
            yield "before the soft cap, which is not linear"
    else:
        yield f"clean {number(report.value, 5)}, corrupted {number(report.corrupted_value, 5)}"
        yield "(clean − corrupted) × gradient"


def _strongest(
    report: AttributeReport, top: int, width: int, ink: Ink
) -> Iterator[RenderableType]:
    """The `top` strongest terms: half that add, on the left, and half that take away."""
    terms = [term for term in report.terms if term.kind != "resid_pre"]
    terms = sorted(terms, key=lambda term: -abs(term.value))
    sides = [
        [f"{signed(t.value):>8}  {term_words(report, t)}" for t in terms if (t.value < 0) == low]
        for low in (False, True)
    ]
    sides = [side[: -(-top // 2)] for side in sides]
    yield from beside(sides, width, ink)


def term_words(report: AttributeReport, term: Contribution) -> str:
    """`layer 3 head 2`, `layer 3 expert 17`, `token embedding`, `bias ln_final.b`."""
    if term.kind == "bias" or term.layer is None:
        words = WORDS.get(term.name, f"{term.kind} {term.name}")
    else:
        part = term.name.split(".")[2].removesuffix("_out")
        kind = part if term.kind == "mixer" else term.kind
        if (kind == "head" and part != "attn") or (part != kind and part[-1].isdigit()):
            kind = f"{part} {kind}"  # a recurrent head, or of the second such part of the layer
        words = f"layer {term.layer} {kind}" + (f" {term.index}" if term.index is not None else "")
    return words if term.position is None else f"{words} at {_place(report, term.position)}"


def _place(report: AttributeReport, at: int) -> str:
    return f"{at} {_differs(report, at)}"


# files


def attribution_page(report: AttributeReport, title: str) -> bytes:
    """Every map and the strongest terms as one HTML file. `title` names the model."""
    terms = sorted(report.terms, key=lambda term: -abs(term.value))[:100]
    data = {
        "heading": "Attribution",
        "terms_heading": "The strongest terms",
        "note": "Red adds, blue takes away; the row of sums has a scale of its own.",
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "words": list(_headline(report)),
        "tokens": [token(one) for one in report.tokens],
        "corrupted": [token(one) for one in report.corrupted or ()],
        "maps": [on_page(one) for one in maps(report)],
        "terms": [[term_words(report, one), finite(one.value, DIGITS)] for one in terms],
        "checks": checks(report.checks),
    }
    return page("attribute", f"Attribution: {title}", data)


def attribution_png(report: AttributeReport, title: str) -> bytes:
    """The first map as a PNG file, and the strongest terms in the footer. `title` names the model.
    """
    of = maps(report)[0]
    terms = sorted(report.terms, key=lambda term: -abs(term.value))[:5]
    words = ", ".join(f"{term_words(report, one)} {signed(one.value)}" for one in terms)
    sums = "; so far has a scale of its own" if of.apart else ""
    heading = f"Attribution: {' · '.join(_headline(report))}"
    return map_png(of, heading, title, f"{of.title}{sums}; {words}", report.ok)
