"""The ladder as text at fixed widths, and its chart as an image."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from llmcli.commands.ladder.report import LadderReport, RungReport, Shown, Spread, Variant, Work
from llmcli.commands.ladder.view import chart
from llmcli.commands.ladder.view.chart import ladder_png
from llmcli.commands.ladder.view.table import bar_lengths, render_ladder
from llmcli.ui.rates import scaled


def spread(seconds):
    return Spread(median=seconds, lowest=seconds, highest=seconds, runs=3)


def rung(number, name, seconds, **more):
    below = more.pop("below", None)
    fields = {
        "number": number, "name": name, "title": f"what {name} is", "idea": "Because.",
        "change": ("before it", "with it"), "sequences": 1, "prompt_s": spread(seconds),
        "token_s": spread(seconds * 2), "prompt_work": Work(gemv=0, gemm=0, flops=0, bytes=0),
        "token_work": Work(gemv=25, gemm=0, flops=36.8e6, bytes=15.1e6), "steps": (),
        "prompt_speedup": None if below is None else below / seconds,
        "token_speedup": None if below is None else below / seconds,
        "compared": None if below is None else "logits",
        "difference": None if below is None else 3e-6, "allowed": None if below is None else 1e-4,
    }  # fmt: skip
    return RungReport(**(fields | more))


def reshaped(formula, moved=False):
    return Shown(
        formula=formula, shape=(8, 4, 32), strides=(32, 256, 1),
        source=((4, 8, 32), (256, 32, 1)), moved=moved, values=((1.0, -0.5), (0.25, 2.0)),
    )  # fmt: skip


SCORES = Shown(
    formula="scores + M", shape=(8, 2, 2), strides=(4, 2, 1), source=None, moved=None,
    values=((0.5, float("-inf")), (0.25, 12345.678)),
)  # fmt: skip
WIDE = Shown(
    formula="Q = T W_q", shape=(100, 256), strides=(256, 1), source=None, moved=None,
    values=((0.5, 1.0), (2.0, 3.0)),
)  # fmt: skip
SPLIT = tuple(reshaped(f"{letter} as h × n × d/h") for letter in "QKV")
RUNGS = (
    rung(1, "loops", 1.5, token_work=Work(gemv=0, gemm=0, flops=1e9, bytes=1e10),
         estimated="block 0 alone, 2 of the 4 tokens"),
    rung(2, "heads", 0.015, below=1.5,
         steps=(*SPLIT, reshaped("merged", moved=True), SCORES, WIDE)),
    rung(3, "fused", 0.003, below=0.015, steps=(SPLIT[0], reshaped("new one")), sequences=4),
)
REPORT = LadderReport(
    tokens=("In", " the\x1b[2J"), ids=(1, 2), more=(" beginning",),
    letters=(("n", 2), ("d", 256), ("d/h", 32)), dtype="float32", rungs=RUNGS,
)


def shown(parts, width, colour=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour,
        color_system="truecolor" if colour else None,
    )  # fmt: skip
    for part in parts:
        console.print(part, crop=False, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def rendered(report, width, details=True, **options):
    return shown(render_ladder(report, "tiny", whole=True, details=details), width, **options)


def test_whole_ladder_at_100_columns():
    assert rendered(REPORT, 100) == """\
tiny
"In" " the\\x1b[2J" and then, one by one, " beginning"
n = 2 tokens (N) · d = 256 width (d_model, hidden_dim) · d/h = 32 a head (d_k, d_v, head_dim)

1  loops  what loops is
  before  before it
  here    with it
  token   no matrix product, 1 GFLOP, 10 GB

2  heads  what heads is
  before  before it
  here    with it
  view    Q, K, V as h × n × d/h  [4,8,32] → [8,4,32]  strides (256,32,1) → (32,256,1)
  copy    merged  [4,8,32] → [8,4,32]  strides (256,32,1) → (32,256,1)
  token   25 GEMV, 0 GEMM, 36.8 MFLOP, 15.1 MB

3  fused  what fused is
  before  before it
  here    with it
  view    new one  [4,8,32] → [8,4,32]  strides (256,32,1) → (32,256,1)
  token   100/4 GEMV, 0 GEMM, 36.8 MFLOP, 15.1 MB

    rung     prompt      ×     token      ×    GEMV   GEMM         Δ    tok/s   log scale
──────────────────────────────────────────────────────────────────────────────────────────
1   loops   ≈1.50 s          ≈3.00 s              0      0         -   ≈0.333   █▌
2   heads     15 ms    100     30 ms    100      25      0   3.0e-06     33.3   ████████
3   fused      3 ms   5.00      6 ms   5.00   100/4      0   3.0e-06      167   ██████████
token: after the prompt; ×: over the rung before, median of pairs (1 is noise)
Δ: largest difference from it; rung 3: a sequence's share of a batch of 4
≈: rung 1 estimated from block 0 alone, 2 of the 4 tokens
✓ every rung agrees with the one before (float32)"""


def test_the_table_alone_fits_a_screen():
    """80 columns and 24 lines, eight rungs of which some are estimated or apart."""
    slow = {"estimated": "block 0 alone, all 4 tokens", "compared": "rows of 4 of 4 tokens"}
    eight = [rung(i, "combined", 123.4 / i, below=1e5, sequences=4) for i in range(3, 9)]
    rungs = (rung(1, "loops", 1234.0, **slow), rung(2, "rows", 5.0, below=9.0, **slow), *eight)
    text = rendered(replace(REPORT, rungs=rungs), 80, details=False)
    lines = text.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert "█" in text
    assert "✓ every rung agrees with the one before, where they were compared (float32)" in text
    assert "before it" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("details", [True, False])
def test_nothing_is_wider_than_the_screen(width, details):
    text = rendered(REPORT, width, details=details)
    tables = max(len(line) for line in text.splitlines())
    assert tables <= max(width, 44)  # the table's least: number, rung, time, speed-up, Δ
    assert "3.0e-06" in text


def test_a_wrong_rung_is_red_and_named():
    wrong = replace(RUNGS[1], difference=0.5)
    report = replace(REPORT, rungs=(RUNGS[0], wrong))
    text = rendered(report, 100)
    verdict = (
        "rung 2: logits differ from the rung before by at most 5.0e-01, "
        "allowed for rounding: 1.0e-04 ✗"
    )
    assert verdict in text
    assert "every rung agrees" not in text
    assert "\x1b[1;31m" in rendered(report, 100, colour=True)
    assert not replace(wrong, difference=float("nan")).ok


def test_beyond_the_rungs():
    variants = (
        Variant(name="decoder", what="rung 8", token_s=spread(0.03), speedup=1.0, difference=0.0,
                divergence=0.0, same_token=True),
        Variant(name="int8", what="8 bits", token_s=spread(0.01), speedup=3.0, difference=0.25,
                divergence=1e-3, same_token=False),
        Variant(name="CUDA graph", what="one launch", missing="needs a CUDA device"),
    )  # fmt: skip
    text = rendered(replace(REPORT, beyond=variants), 80)
    assert """\
beyond rung 8   next token      ×   Δ logits   KL, nats   same token
────────────────────────────────────────────────────────────────────
decoder              30 ms   1.00    0.0e+00    0.0e+00          yes
int8                 10 ms   3.00    2.5e-01    1.0e-03           no
""" in text
    assert "CUDA graph: not here: needs a CUDA device" in text


def test_bars_are_logarithms():
    assert bar_lengths([1.0, 10.0, 100.0]) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert bar_lengths([5.0]) == [1.0]
    lengths = bar_lengths([0.03, 300.0])
    assert 0 < lengths[0] < lengths[1] == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (999.6, "1 k"), (36.8e6, "36.8 M"), (2e12, "2 T"), (37, "37")],
)
def test_numbers_have_three_digits_and_a_prefix(value, text):
    assert scaled(value) == text


def test_the_chart_is_an_image_with_a_bar_for_each_rung():
    from PIL import Image

    wrong = replace(RUNGS[2], difference=1.0)
    report = replace(REPORT, rungs=(*RUNGS[:2], wrong))
    image = Image.open(io.BytesIO(ladder_png(report, "tiny → x")))
    assert image.format == "PNG"
    colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 20)}
    estimated, plain, red = (colours.get(c, 0) for c in (chart.ESTIMATED, chart.FILL, chart.WRONG))
    assert 0 < estimated < plain < red  # the faster the longer, and the last one is wrong
