"""Attribution: the strongest terms in words, and a map of all, in the terminal, as page and PNG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attribute.report import AttributeReport
from llmcli.records.contribution import Contribution
from llmcli.records.numbers import counted
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Line, fitted, in_words
from llmcli.ui.maps import DIGITS, Map, draw_map, map_png, on_page, signed
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink
from llmcli.ui.theme import HEADING, one_line

AROUND = 8  # lines of a screen beside the rows of the map and the terms in words
LEAST = 4  # rows of a map at least
HALF, NARROW = 56, 60  # … of one of two terms side by side, at most; where none are
IN_THE_PAGE = 100  # terms in words
MLPS = ("mlp", "expert", "shared expert")
MLP, OTHER = 1 << 30, 1 << 31  # rows below those of heads
NAMES = {MLP: "mlp", OTHER: "other"}
WORDS = {"embed": "token embedding", "pos_embed": "position embedding"}
TITLES = {
    "direct": "what each part of each layer adds",
    "resid_pre": "the stream before each layer",
    "head": "heads, all positions together",
}


def maps(report: AttributeReport) -> list[Map]:
    """The maps of a report, layers across.

    Direct: heads, feed-forward, all else, and the sum so far down; embeddings come first, the head
    last. Of gradients one for each kind: positions down, or heads, all positions together.
    """
    layers = 1 + max((t.layer for t in report.terms if t.layer is not None), default=-1)
    direct, heads = report.method == "direct", [0] * (layers + 2)
    found = defaultdict[str, dict[tuple[int, int], float]](dict)
    for term in report.terms:
        at = layers if term.layer is None else term.layer
        row = (term.position or 0) if term.index is None else term.index
        title = TITLES.get(term.kind, f"{term.kind} of each layer")
        if direct:
            title, at = TITLES["direct"], 0 if term.kind == "embedding" else at + 1
            row = heads[at] if term.kind == "head" else MLP if term.kind in MLPS else OTHER
            heads[at] += term.kind == "head"  # those of two mixers follow one another
        found[title][row, at] = found[title].get((row, at), 0.0) + term.value
    columns = [*["in"] * direct, *map(str, range(layers)), "out"]
    made = []
    for title, cells in found.items():
        rows = sorted({row for row, _ in cells})
        values = np.full((len(rows), 1 + max(at for _, at in cells)), np.nan)
        for (row, at), value in cells.items():
            values[rows.index(row), at] = value
        by_head = title in (TITLES["direct"], TITLES["head"])
        words = (f"head {row}" if by_head else _place(report, row) for row in rows if row < MLP)
        names = [*words, *(NAMES[row] for row in rows if row >= MLP)]
        if direct:
            values = np.vstack([values, np.nansum(values, axis=0).cumsum()])
            names.append("so far")
        made.append(
            Map(
                title=title, names=names, columns=columns[: values.shape[1]], values=values,
                numbered=max(heads) if direct else len(rows),
                apart=int(direct), apart_title="so far: their sum" * direct,
            )
        )  # fmt: skip
    return made


def _place(report: AttributeReport, at: int) -> str:
    """A position with its token, or both tokens where they differ."""
    clean, other = report.tokens[at], (report.corrupted or report.tokens)[at]
    differs = "" if clean.id == other.id else f"≠{in_words(other)}"
    return f"{at} {in_words(clean)}{differs}"


def render_attribution(
    report: AttributeReport, title: str, *, top: int, height: int | None = None, whole: str = ""
) -> RenderableType:
    """What the number is, its strongest terms in words, and the map of all.

    `title` is the model's line. `height`: of the screen in lines, where a row of the map may stand
    for several. `whole` names the option that shows all.
    """
    most = None if height is None else max(LEAST, height - AROUND - -(-top // 2))
    of = maps(report)[0]
    return Group(
        Text(one_line(title), style=HEADING),
        Line(list(_headline(report))),
        Fit(lambda width, ink: _strongest(report, top, width, ink)),
        Fit(lambda width, ink: draw_map(of, most, whole, width, ink)),
    )


def _headline(report: AttributeReport) -> Iterator[str]:
    """The number, and how the terms make it up."""
    what = f"{report.number}[{','.join(map(str, report.index or ()))}]"
    if report.answer is not None:
        versus = "" if report.versus is None else f" − {in_words(report.versus)}"
        what = f"logit of {in_words(report.answer)}{versus}"
    yield f"{what} after {in_words(report.tokens[-1])} at {len(report.tokens) - 1}"
    if report.method == "gradient":
        yield f"clean {number(report.value, 5)}, corrupted {number(report.corrupted_value, 5)}"
        yield "(clean − corrupted) × gradient"
        if report.correlation is not None:
            patched = sum(term.patched is not None for term in report.terms)
            yield f"correlation with patching {report.correlation:.3f} at the {patched} strongest"
        return
    terms = counted(len(report.terms), "term")
    yield f"{number(report.value, 5)} = Σ {number(report.sum, 5)} of {terms}"
    if report.number == "logits_raw":
        yield "before the soft cap, which is not linear"


def _by_size(report: AttributeReport) -> list[Contribution]:
    """The strongest term first, without the stream, which has all others in it."""
    terms = [term for term in report.terms if term.kind != "resid_pre"]
    return sorted(terms, key=lambda term: -abs(term.value))


def _strongest(report: AttributeReport, top: int, width: int, ink: Ink) -> Iterator[RenderableType]:
    """The `top` strongest terms: half that add, on the left, and half that take away."""
    lines = [(t.value < 0, f"{signed(t.value):>8}  {term_words(report, t)}")
             for t in _by_size(report)]  # fmt: skip
    sides = [[words for low, words in lines if low == side][: -(-top // 2)] for side in (0, 1)]
    if width < NARROW:
        sides = [[*sides[0], *sides[1]], []]
    half = min(width // 2, HALF) if sides[1] else width
    for at in range(max(map(len, sides))):
        left, right = (side[at] if at < len(side) else "" for side in sides)
        yield Text(f"{fitted(left, half - 1, ink)} {fitted(right, half, ink)}".rstrip())


def term_words(report: AttributeReport, term: Contribution) -> str:
    """`layer 3 head 2`, `layer 3 expert 17`, `token embedding`, `bias ln_final.b`."""
    words = WORDS.get(term.name, f"{term.kind} {term.name}")
    if term.kind != "bias" and term.layer is not None:
        part = term.name.split(".")[2].removesuffix("_out")
        kind = part if term.kind == "mixer" else term.kind
        if (kind == "head" and part != "attn") or (part != kind and part[-1].isdigit()):
            kind = f"{part} {kind}"  # a recurrent head, or of the second such part of the layer
        words = f"layer {term.layer} {kind}" + (f" {term.index}" if term.index is not None else "")
    return words if term.position is None else f"{words} at {_place(report, term.position)}"


# files


def attribution_page(report: AttributeReport, title: str) -> bytes:
    """Every map and the strongest terms as one HTML file. `title` names the model."""
    data = {
        "heading": "Attribution",
        "terms_heading": "The strongest terms",
        "note": "Red adds, blue takes away; the row of sums has a scale of its own.",
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "words": list(_headline(report)),
        "tokens": [token(one) for one in report.tokens],
        "corrupted": [token(one) for one in report.corrupted or ()],
        "maps": [on_page(one) for one in maps(report)],
        "terms": [
            [term_words(report, one), finite(one.value, DIGITS)]
            for one in _by_size(report)[:IN_THE_PAGE]
        ],
        "checks": checks(report.checks),
    }
    return page("maps", f"Attribution: {title}", data)


def attribution_png(report: AttributeReport, title: str) -> bytes:
    """The first map as a PNG file, the strongest terms in its footer. `title` names the model."""
    of = maps(report)[0]
    terms = (f"{term_words(report, one)} {signed(one.value)}" for one in _by_size(report)[:5])
    parts = [*["so far has a scale of its own"] * of.apart, ", ".join(terms)]
    heading = f"Attribution: {next(_headline(report))}"
    return map_png(of, heading, title, "; ".join(parts), report.ok)
