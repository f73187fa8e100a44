"""Views of many tokens, heads or layers at every width: no line is wider than the screen.

Nor do tokens, of whatever signs they are made, leave their cells. The other views are in the
transcripts, where a line that is wider than its terminal is an error.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
from attention_reports import BAD, GOOD, LABELS, METRICS, head, matrix, pair, pattern, report
from drawn import changes, lines_of, shown
from files_reports import attribution_report, experts_report, lens_report
from rich.cells import cell_len
from small_models import weights
from zoo import CONFIGS

from llmcli.checkpoints import open_model
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.attention.report import LayerReport
from llmcli.commands.attention.view.heads import head_map, kinds_found, metric_table
from llmcli.commands.attention.view.screen import FollowUps, overview, render_attention
from llmcli.commands.attribute.view import render_attribution
from llmcli.commands.experts.view import render_experts
from llmcli.commands.info.measure import measure_info
from llmcli.commands.info.view import render_info
from llmcli.commands.ladder.measure.runner import plan_workload, run_ladder
from llmcli.commands.ladder.measure.texts import axis_sizes
from llmcli.commands.ladder.report import LadderReport
from llmcli.commands.ladder.view import render_ladder, render_rung
from llmcli.commands.lens.view import render_lens
from llmcli.commands.score.report import ScoredToken
from llmcli.commands.score.view import Surprising
from llmcli.kernels import native
from llmcli.records.info import Device
from llmcli.records.text import Token
from llmcli.ui.layout import Line
from llmcli.ui.numbers import short

TITLE = "tiny (float32)"
HOSTILE = (
    "[red]x[/]", "\x1b[31mred\x1b]0;t\x07", "a\nb\r\n", "漢字漢字漢字漢字", "e\u0301" * 9,
    "a\u200bb\u202e", "\\xf0\\x9f", "שלום", "👩‍👩‍👧", "   ", "", "\ud800", "a" * 60,
)  # fmt: skip
UNSEEN = {*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\ud800"}


def of_attention():
    texts = tuple(HOSTILE[at % len(HOSTILE)] for at in range(23))
    found = report(
        texts, pairs=(pair(3, 1), pair(8, 4, 0.1, 2.5)), matrices=(matrix(pattern(23)),),
        checks=(GOOD, BAD),
    )  # fmt: skip
    calls = FollowUps(same="llmcli attention x", repeated="llmcli attention --synthetic 32")
    everything = {"map": "effective_keys", "scale": "log", "metrics": "all", "top_pairs": 2}
    yield render_attention(found, "model", AttentionOptions(**everything), calls)
    yield render_attention(replace(found, matrices=()), "model", AttentionOptions(), calls)


def of_lens():
    for ranks in (False, True):
        yield render_lens(lens_report(60, first=0), TITLE, ranks=ranks)


def of_experts():
    for found in (
        experts_report(12), experts_report(90, layers=5, experts=128, per_token=8),
        experts_report(9, experts=64, per_token=6, first=8), experts_report(6, shared=False),
    ):  # fmt: skip
        yield render_experts(found, TITLE)


def of_attribution():
    for found in (
        attribution_report(), attribution_report(layers=90, heads=64),
        attribution_report(60, method="gradient"), attribution_report(13, 40, method="gradient"),
    ):  # fmt: skip
        hostile = [replace(one, text=HOSTILE[at % 13]) for at, one in enumerate(found.tokens)]
        for height in (None, 24):
            of = replace(found, tokens=tuple(hostile))
            yield render_attribution(of, TITLE, top=10, height=height, whole="--all")


def of_ladder():
    of = weights(CONFIGS["window"])
    for budget in (0.0, 20.0):
        read = plan_workload(of, range(1, 7), more=1, sequences=2, rounds=0, budget=budget)
        found = LadderReport(
            tokens=HOSTILE[:6], ids=(1,) * 6, more=HOSTILE[6:7], dtype="float64",
            letters=axis_sizes(of.config, tokens=6, sequences=2),
            rungs=run_ladder(of, read, record=True),
        )  # fmt: skip
        for details in (True, False):
            yield from render_ladder(found, TITLE, details=details)
        for rung in found.rungs:
            yield from render_rung(rung, found, TITLE)


# the views, the fewest columns that they need, and what stays whole in each of them
VIEWS = {
    "attention": (of_attention, 40, []), "tokens of attention": (of_attention, 60, ["[red]"]),
    "attribute": (of_attribution, 40, ["9 is "]), "experts": (of_experts, 40, []),
    "ladder": (of_ladder, 44, []),
    "lens": (of_lens, 40, ["positions ", " to 59 of 60 tokens", "more: --position :"]),
}  # fmt: skip


@cache
def views(name):
    return list(VIEWS[name][0]())


HOWS = [{}, {"encoding": "ascii"}, {"colour": "standard"}, {"colour": "truecolor"}]


@pytest.mark.parametrize(("name", "width", "how"), [
    (name, width, HOWS[(i + j) % 4])  # all pairs
    for i, name in enumerate(VIEWS) for j, width in enumerate((40, 44, 60, 80, 120, 200))
])  # fmt: skip
def test_it_fits(name, width, how):
    _, fewest, words = VIEWS[name]
    for view in views(name):
        lines = lines_of(view, width=width, **how)
        assert width < fewest or max(map(cell_len, lines)) <= width
        assert not UNSEEN & set("".join(lines))
        flat = " ".join(" ".join(lines).split())
        for word in words if width >= fewest and "encoding" not in how else ():
            assert word.strip() in flat or word in "".join(lines)


def test_a_number_stays_with_its_unit():
    words = "reads 84 MB of weights in 1.2 s, 61 % of 3.48 ms a token at 397 MFLOP"
    for width in range(20, 70):
        for line in lines_of(Line([words, "peak 5 GiB"]), width=width):
            assert not re.match(r"\s*(%|[kMG]i?B\b|MFLOP\b|ms\b)", line), (width, line)


def test_no_screen_is_wider_than_a_wide_one():
    tokens = tuple(Token(id=5, text=f"t{at}") for at in range(900))
    for view, ends in (
        (render_experts(replace(experts_report(900), tokens=tokens), TITLE), " 898 │899"),
        (render_lens(lens_report(500, first=0), TITLE), "499"),
    ):
        line = lines_of(view, width=10_000)[1].rstrip()
        assert line.endswith(ends)
        assert cell_len(line) <= 240


# ---- maps of models of every size: each head and each layer is there, at every width

ENTROPY, _, PREVIOUS, _ = METRICS


def of(*heads, layer=0, group=1, **changed):
    """A report of one layer of those heads."""
    one = LayerReport(layer=layer, kind="full", kv_heads=len(heads) // group or 1, heads=heads)
    return report(layers=(one,), **changed)


def tall(layers, heads, group=1):
    """So many layers of plain heads; the metric of head h of layer n is n + h / heads."""
    found = []
    for n in range(layers):
        row = (head(h, h // group, previous_token=(n + h / heads) / layers) for h in range(heads))
        kv_heads = heads // group
        found.append(LayerReport(layer=n, kind="full", kv_heads=kv_heads, heads=tuple(row)))
    return report(layers=tuple(found))


@pytest.mark.parametrize(
    ("layers", "heads", "group", "width", "lines"),
    [(30, 9, 3, 80, 10), (12, 12, 1, 80, 6), (24, 16, 8, 80, 8), (32, 32, 4, 80, 16),
     (32, 32, 4, 120, 11), (30, 9, 3, 40, 10), (80, 64, 8, 80, 80), (9, 9, 3, 80, 9)],
)  # fmt: skip
def test_layers_stand_beside_each_other_where_there_are_many(layers, heads, group, width, lines):
    drawn = head_map(tall(layers, heads, group), ENTROPY, numbers=False)
    *found, _, _ = lines_of(drawn, width=width)
    assert len(found) == 1 + lines
    assert all(cell_len(line) <= width for line in found)
    # what is beside each other is read down, then on to the right
    columns = [re.findall(r"(?:^|  ) ?(\d+) (?=[ -])", line) for line in found[1:]]
    numbers = sorted(int(number) for row in columns for number in row)
    assert numbers == list(range(layers))
    assert [int(row[0]) for row in columns] == list(range(lines))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("heads", [1, 9, 32, 71, 128])
@pytest.mark.parametrize("numbers", [False, True])
def test_every_head_is_there_at_every_width(width, heads, numbers):
    group = {9: 3, 32: 4, 128: 16}.get(heads, 1)
    one = of(*(head(n, n // group, previous_token=n / heads) for n in range(heads)), group=group)
    found = lines_of(head_map(one, PREVIOUS, numbers=numbers), width=width)
    assert all(cell_len(line) <= width for line in found)
    rows = [re.sub("^0 +", "", line) for line in found if re.match("0 +[-.]", line)]
    signs = [sign for row in rows for sign in re.split(r"[ │]+", row) if sign]
    if numbers:
        assert signs == [short(n / heads, True) for n in range(heads)]
    else:
        assert "".join(signs) == "-" * heads
    assert "".join(rows).count("│") <= heads // group - 1


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 7, 90, 300])
def test_as_many_heads_are_named_as_a_line_holds(width, count):
    kind = ("previous-token",)
    heads = (head(n, labels=kind, previous_token=0.9 - n / 1000) for n in range(count))
    lines = lines_of(kinds_found(of(*heads, layer=10, labels=LABELS[:1])), width=width)
    assert len(lines) <= (1 if width > 40 else 2)  # of 40 columns the rule alone fills one
    assert max(map(len, lines)) <= width
    named = re.findall(r"10\.\d+ \.\d\d", " ".join(lines))
    more = re.search(r"(\d+) more$", lines[-1])
    assert len(named) + (int(more[1]) if more else 0) == count
    assert named == [f"10.{n} {short(0.9 - n / 1000, True)}" for n in range(len(named))]
    if width >= 80 and more:
        assert sum(map(len, lines)) > width - 25  # no room is left for two more


def test_kinds_of_few_heads_are_marked_and_no_value_is_rounded_up_to_a_threshold():
    def shown(*labels, **changed):
        heads = [head(n, labels=one, previous_token=0.3999) for n, one in enumerate(labels)]
        return lines_of(kinds_found(of(*heads, **changed)), width=200)

    assert shown((), ())[0].startswith("no head: previous-token (highest 0.0 .39) · ")
    assert shown(("broad",), ())[0] == "· broad ≥ 0.8: 1 of 2 heads · 0.0 .10"
    assert shown(("broad",), (), (), ())[0] == "b broad ≥ 0.8: 1 of 4 heads · 0.0 .10"
    # that others cannot be told is said beside heads that are of a kind
    untold = shown(("induction",), unlabelled={"broad": "only 2 rows qualify"})
    assert untold[0] == "i induction ≥ 0.4: 1 of 1 heads · 0.0 .10"
    assert untold[-1] == "undetermined: broad (only 2 rows qualify)"
    three = of(*(head(n, labels=("previous-token", "induction")[:n]) for n in range(3)))
    assert lines_of(head_map(three, ENTROPY, numbers=False))[1].split() == ["0", "-", "p", "pi"]


def test_repeated_text_leads_to_an_induction_head_and_other_text_to_the_first_kind():
    """No model of the tests has such heads: the order of kinds is seen here alone."""
    first = head(0, labels=("previous-token",), previous_token=0.9)
    heads = first, head(1, labels=("induction",), induction=0.5)
    for repeated, named in ((None, "4.1 (induction)"), ("y", "4.0 (previous-token)")):
        page = overview(of(*heads, layer=4), FollowUps(same="x", repeated=repeated))
        *_, last = lines_of(page, width=200)
        assert last == f"head {named}: x --layer 4 --head {named[2]}"


def test_text_around_a_surprising_token_is_cut_between_characters():
    """Line breaks, an escape, part of a character, an ideograph of two columns, and an id."""
    texts = ["\n", "\n\x1b", "\\xe6", "日\n", ""] * 8
    tokens = [ScoredToken(id=457, text=text, logprob=-1.0, rank=2) for text in texts]
    whole = re.compile(r"\\n|\\x1b|\\xe6|日| ?457|[\[\]]")
    for width in range(31, 90):
        _, *lines = lines_of(Surprising(tokens, range(40)), width=width)
        assert len(lines) == 40
        assert max(map(cell_len, lines)) <= width
        for line in lines:
            assert not whole.sub("", line.split(maxsplit=3)[3])


def test_a_metric_that_is_wider_than_the_screen_stands_beside_its_heads():
    for width, tables in ((20, 2), (60, 1)):
        lines = lines_of(metric_table(of(head(0), head(1)), METRICS[:2]), width=width)
        headers = [line.split() for line in lines if line.startswith("head")]
        assert len(headers) == tables
        assert headers[0][:2] == ["head", "normalized_entropy"]


# ---- `info` of devices that are not here, which no transcript has

CPU = Device(device="cpu", name="Some CPU", total_bytes=16 << 30, free_bytes=4 << 30, bfloat16=True)
GPUS = [replace(CPU, device=f"cuda:{i}", name="NVIDIA H200") for i in range(8)]


@pytest.fixture
def info(monkeypatch):
    """The report; estimates of memory depend on the kernels that there are."""
    monkeypatch.setattr(native, "level", lambda: "avx2")

    def made(*devices, path="tiny", **how):
        found = measure_info(open_model("tiny"), devices, dtype="float32", **how)
        return replace(found, file=replace(found.file, path=path))

    return made


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_every_line_of_info_fits_and_every_device_is_there(info, width, gpus):
    mapped = replace(CPU, free_bytes=1 << 20)
    found = info(*GPUS[:gpus], mapped, path="/somewhere" * 30, batch=2)
    for full in (False, True):
        lines = lines_of(render_info(found, full=full, metadata=True), width=width)
        assert max(map(cell_len, lines)) <= width
        assert sum(line.count("/somewhere") + line.endswith("/") for line in lines) == 30
        assert all(any(line.startswith(f"cuda:{i} ") for line in lines) for i in range(gpus))
        assert sum(" fits: " in line and " of 4" in line for line in lines) == gpus
        assert sum("does not fit" in line for line in lines) == 1


def test_screens_of_info(info, golden):
    packed = info(replace(CPU, free_bytes=1 << 20))
    formats = packed.memory[0].need.formats | {"product_format": "int16"}
    need = replace(packed.memory[0].need, formats=formats)
    plain = shown(render_info(info(CPU)))

    def new(*devices):
        return changes(plain, shown(render_info(info(*devices))))

    golden("info", {
        "without a size of the memory": new(replace(CPU, free_bytes=None)),
        "without a CUDA in PyTorch": new(replace(GPUS[0], usable=False)),
        "two devices, in full": shown(render_info(info(GPUS[0], CPU, batch=2), full=True)),
        "blocks that do not fit stay in the file": changes(
            shown(render_info(packed)),
            shown(render_info(replace(packed, memory=(replace(packed.memory[0], need=need),)))),
        ),
    })  # fmt: skip
