"""What is shown, printed to a console of fixed width and compared as text."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from llmcli.commands.env.report import (
    ConfigurationProblem,
    ConfigurationReport,
    ConfiguredOption,
    EnvironmentReport,
    Setting,
)
from llmcli.commands.env.view import Settings, render_environment
from llmcli.reports.environment import Environment
from llmcli.reports.info import NO_FORMATS
from llmcli.reports.text import (
    Comparison,
    PhasePeak,
    Score,
    ScoredToken,
    Timings,
    TokenPiece,
    TokensReport,
)
from llmcli.ui import stats, theme, tokens


def shown(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


TIMINGS = Timings(
    import_s=1.0, load_s=0.24, first_token_s=0.0521, prompt_tokens=12, prompt_tokens_per_s=230.3,
    generated_tokens=64, generated_tokens_per_s=41.234, peak_memory_bytes=432 * 2**20,
)  # fmt: skip


def test_short_statistics_are_one_line_where_there_is_room():
    assert shown(stats.short_stats(TIMINGS, "bfloat16", 7, 200), 200) == (
        "prompt 12 tokens, 230 tok/s · first token 52.1 ms · generated 64 tokens, 41.2 tok/s · "
        "bfloat16 · peak memory 432 MiB · load 1.24 s · seed 7"
    )


def test_short_statistics_say_what_ended_the_text():
    drafted = {"proposed": 4, "accepted": 1, "speedup": None}
    line = shown(stats.short_stats(TIMINGS, "F", 7, 300, drafted, ended="ended by `-n 64`"), 300)
    assert "41.2 tok/s · ended by `-n 64` · draft 1 of 4 tokens right (25%) · F · " in line


def test_a_draft_without_proposals_claims_no_speed():
    assert stats.draft_words({"proposed": 0, "accepted": 0, "speedup": 1.0}) == "proposed nothing"


def test_short_statistics_break_between_parts():
    assert shown(stats.short_stats(TIMINGS, "float32", None, 60), 60).splitlines() == [
        "prompt 12 tokens, 230 tok/s · first token 52.1 ms",
        "generated 64 tokens, 41.2 tok/s · float32",
        "peak memory 432 MiB · load 1.24 s",
    ]


def test_statistics_of_a_run_that_wrote_nothing():
    nothing = replace(
        TIMINGS, first_token_s=None, prompt_tokens_per_s=None, generated_tokens=0,
        generated_tokens_per_s=None, peak_memory_bytes=None,
    )  # fmt: skip
    assert shown(stats.short_stats(nothing, "float32", None, 99), 99) == (
        "prompt 12 tokens · generated 0 tokens · float32 · load 1.24 s"
    )


def test_full_statistics_say_where_values_come_from():
    text = shown(stats.full_stats(TIMINGS, {"top_k": (40, "default")}, None, "m (bfloat16 on cpu)"))
    assert "model            m (bfloat16 on cpu)" in text
    assert "top k            40  (default)" in text
    assert "seed             none: greedy" in text
    assert "of the process" not in text


def test_full_statistics_have_the_peak_of_every_phase_that_is_known():
    peaks = (
        PhasePeak(phase="base", resident_bytes=230 * 2**20, device_bytes=None),
        PhasePeak(phase="load", resident_bytes=None, device_bytes=300 * 2**20),
        PhasePeak(phase="prefill", resident_bytes=700 * 2**20, device_bytes=2**30),
    )
    text = shown(stats.full_stats(replace(TIMINGS, peaks=peaks), {}, None, "m"))
    assert "peak memory       432 MiB" in text
    assert "  of the process  base 230 MiB · prefill 700 MiB" in text
    assert "  on the GPU      load 300 MiB · prefill 1 GiB" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000123, "0.0123 ms"), (0.0521, "52.1 ms"), (0.4, "400 ms"), (0.9996, "1.00 s"),
     (12.345, "12.35 s"), (125.9, "2 min 5 s")],
)  # fmt: skip
def test_durations(seconds, text):
    assert stats.duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (432 * 2**20, "432 MiB"),
     (1023 * 2**20, "0.999 GiB"), (25276510208, "23.5 GiB"), (2**41, "2048 GiB")],
)  # fmt: skip
def test_sizes(nbytes, text):
    assert stats.size(nbytes) == text


REPORT = TokensReport(
    text="hi [b]", rendered=None, bytes=6, vocabulary=99, bos=1, adds_bos=True, eos=(2, 5),
    tokens=(
        TokenPiece(id=1, text="<s>", bytes="", start=0, end=0, special=True),
        TokenPiece(id=40, text="hi", bytes="6869", start=0, end=2, special=False),
        TokenPiece(id=41, text=" [b]\n\x1b", bytes="205b625d0a1b", start=2, end=6, special=False),
    ),
)  # fmt: skip


def test_tokens():
    assert shown(tokens.render_tokens(REPORT), 99).splitlines() == [
        "#   id   token                    bytes",
        "───────────────────────────────────────",
        '0    1   "<s>"          special     0–0',
        '1   40   "hi"                       0–2',
        '2   41   " [b]\\n\\x1b"               2–6',
        "3 tokens · 6 bytes, 2.00 a token · vocabulary 99 · BOS 1 is put in front"
        " · end-of-text ids 2, 5",
    ]


def test_a_long_text_is_drawn_line_by_line_and_not_cell_by_cell(monkeypatch):
    """A `Text` for every cell took most of the time and the memory of a text of megabytes."""
    many = replace(REPORT, tokens=REPORT.tokens[1:] * 1000)
    made = []
    begin = Text.__init__
    monkeypatch.setattr(Text, "__init__", lambda *a, **k: made.append(1) or begin(*a, **k))
    lines = shown(tokens.render_tokens(many), 99).splitlines()
    assert len(made) < 100
    assert len(lines) == 2 + 2000 + 1
    assert lines[2000].split() == ["1998", "40", '"hi"', "0–2"]


def test_tokens_in_few_columns():
    one = replace(REPORT, tokens=REPORT.tokens[2:], bytes=1, adds_bos=False, eos=(2,))
    assert shown(tokens.render_tokens(one), 25).splitlines() == [
        "#   id   token      bytes",
        "─────────────────────────",
        '0   41   " [b]\\n…     2–6',
        "1 token",
        "1 byte, 1.00 a token",
        "vocabulary 99",
        "no BOS is put in front",
        "end-of-text id 2",
    ]


SCORE = Score(
    tokens=(
        ScoredToken(id=4, text="[red]", logprob=None, rank=None),
        ScoredToken(id=5, text=" é internationalis", logprob=math.log(0.5), rank=2),
    ),
    tokens_scored=1, bytes_scored=3, mean_logprob=math.log(0.5), perplexity=2.0,
    bits_per_byte=1 / 3, window=64, stride=32, seconds=0.1,
)  # fmt: skip


def test_score():
    assert shown(tokens.render_score(SCORE, "m (float32 on cpu)"), 70).splitlines() == [
        "m (float32 on cpu)",
        "#   id   token                  logprob     prob   rank",
        "───────────────────────────────────────────────────────",
        '0    4   "[red]"                      –        –      –',
        '1    5   " é internationalis"   -0.6931   50.00%      2',
        "",
        "scored         1 of 2 tokens, 3 bytes",
        "mean logprob   -0.6931",
        "perplexity     2.0000",
        "bits per byte  0.3333",
    ]


@pytest.mark.parametrize(
    ("width", "last"),
    [
        (50, '1    5   " é internatio…   -0.6931   50.00%      2'),
        (38, '1    5   " é interna…   -0.6931      2'),
        (20, '1    5   " é int…   -0.6931      2'),
    ],
)
def test_a_narrow_score_cuts_tokens_and_never_numbers(width, last):
    lines = shown(tokens.render_score(SCORE, "m"), width).splitlines()
    assert lines[4] == last
    assert max(map(len, lines[1:5])) <= max(width, 34)


def test_a_score_without_a_tokenizer_has_no_column_of_tokens():
    bare = tuple(replace(token, text="") for token in SCORE.tokens)
    score = replace(SCORE, tokens=bare, bytes_scored=0, bits_per_byte=math.nan)
    assert shown(tokens.render_score(score, "m")).splitlines()[1:] == [
        "#   id   logprob     prob   rank",
        "────────────────────────────────",
        "0    4         –        –      –",
        "1    5   -0.6931   50.00%      2",
        "",
        "scored         1 of 2 tokens",
        "mean logprob   -0.6931",
        "perplexity     2.0000",
        "bits per byte  undefined: no tokenizer, so no bytes",
    ]


def test_the_middle_of_a_long_score_is_left_out_unless_asked_for():
    long = replace(SCORE, tokens=(SCORE.tokens[1],) * 61)
    lines = shown(tokens.render_score(long, "m")).splitlines()
    assert lines[22].startswith("19 ")
    assert lines[23] == "… 21 tokens not shown: --all or --json has them all"
    assert lines[24].startswith("41 ")
    assert lines[43].startswith("60 ")
    assert len(shown(tokens.render_score(long, "m", every=True)).splitlines()) == 69
    sixty = replace(long, tokens=long.tokens[1:])
    assert "not shown" not in shown(tokens.render_score(sixty, "m"))


def test_score_of_nothing_and_of_windows():
    nothing = replace(SCORE, tokens_scored=0, perplexity=math.nan)
    assert "perplexity     undefined: nothing was scored" in shown(tokens.render_summary(nothing))
    windows = shown(tokens.render_summary(replace(SCORE, window=1), "name"))
    assert windows.startswith("name\n")
    assert "context        windows of 1 token, 32 apart" in windows


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2.0000"), (33.31931, "33.3193"), (42042.156, "42042.2"), (7654321.9, "7654322"),
     (1e300, "1e+300"), (math.inf, "infinite")],
)  # fmt: skip
def test_perplexities_have_the_digits_that_mean_something(value, text):
    line = shown(tokens.render_summary(replace(SCORE, perplexity=value))).splitlines()[2]
    assert line == f"perplexity     {text}"


@pytest.mark.parametrize(
    ("probability", "text"),
    [(1.0, "100.00%"), (0.0034, "0.34%"), (0.000082, "0.0082%"), (1.6e-7, "1.6e-05%"), (0, "0%")],
)
def test_small_probabilities_keep_two_digits(probability, text):
    assert tokens.percent(probability) == text


@pytest.mark.parametrize(
    ("values", "first", "second"),
    [
        ((0.25, -0.5, 0.7, True), "a needs 0.2500 bits per byte fewer", "mean logprob differs by"),
        ((-0.25, None, None, False), "b needs 0.2500 bits per byte fewer", "their tokens differ"),
        ((0.0, 0.0, 0.1, True), "both need the same bits per byte", "at most 0.100000"),
        ((math.nan, 0.5, 0.7, True), "b has the higher mean logprob", "differs by +0.500000"),
        ((math.nan, None, None, False), "nothing was scored", "their tokens differ"),
    ],
)
def test_comparison(values, first, second):
    bits, mean, largest, same = values
    comparison = Comparison(
        bits_per_byte=bits, mean_logprob=mean, largest_difference=largest, same_tokens=same
    )
    lines = shown(tokens.render_comparison(comparison, "a", "b")).splitlines()
    assert first in lines[0]
    assert second in lines[1]


def test_comparison_with_itself():
    same = Comparison(bits_per_byte=0.0, mean_logprob=0.0, largest_difference=0.0, same_tokens=True)
    assert shown(tokens.render_comparison(same, "a", "b")).startswith("identical")


@pytest.mark.parametrize(
    ("stored", "used", "line"),
    [
        (["F32", "Q4_1", "Q8_0"], "float32", "m (Q4_1, Q8_0 → float32 on cpu)"),
        (["F32"], "float32", "m (float32 on cpu)"),
        (["BF16"], "bfloat16", "m (bfloat16 on cpu)"),
        ([], "float32", "m (float32 on cpu)"),
    ],
)
def test_the_line_of_a_model_says_what_became_of_its_weights(stored, used, line):
    formats = dict.fromkeys(NO_FORMATS, used)
    model = {"name": "m", "stored_formats": stored, "device": "cpu", **formats}
    assert stats.model_line(model) == line


@pytest.mark.parametrize(
    ("stored", "words"),
    [(["F32", "Q4_1", "Q8_0"], "Q4_1 + Q8_0"), (["BF16"], "BF16 → Q4_1 + Q8_0")],
)
def test_the_line_of_a_packed_model_says_what_is_rounded(stored, words):
    model = {
        "name": "m", "stored_formats": stored, "device": "cpu", "weight_format": "Q4_1 + Q8_0",
        "activation_format": "float32", "cache_format": "bfloat16", "product_format": "int8",
    }  # fmt: skip
    line = f"m ({words} on cpu: int8 products, float32 activations, bfloat16 cache)"
    assert stats.model_line(model) == line


def test_environment_never_reads_markup_or_codes():
    environment = Environment(
        llmcli="0.1.0", python="3.12.1", platform="Linux", processor="CPU [bold]", cores=8,
        features=("avx2",), memory_bytes=2**34, gpus=(), driver=None, torch=None,
        kernel_level="avx2",
    )  # fmt: skip
    settings = (
        Setting(
            name="model",
            value=None,
            words="evil\x1b[2J",
            source="environment",
            origin="LLMCLI_MODEL",
        ),
        Setting(name="seed", value=None, words="3", source="flag", origin="--seed"),
        Setting(name="dtype", value=None, words="auto", source="default", origin=""),
    )  # fmt: skip
    configuration = ConfigurationReport(
        path="/c.toml", exists=True,
        options=(ConfiguredOption(command="chat", option="system", value="\x9b2J" + "x" * 300),),
        problems=(ConfigurationProblem(message="evil\x1b[2J", hint=None),),
    )  # fmt: skip
    report = EnvironmentReport(
        environment=environment, settings=settings, configuration=configuration
    )
    text = shown(render_environment(report))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "processor CPU [bold] · 8 cores" in lines
    assert "memory 16 GiB" in lines
    assert "software llmcli 0.1.0 · PyTorch not installed · Python 3.12.1" in lines
    assert "model evil\\x1b[2J variable LLMCLI_MODEL" in lines
    assert "seed 3 flag --seed" in lines
    assert "dtype auto" in lines
    assert any(line.startswith('[chat] system "\\x9b2Jxx') for line in lines)
    assert 0 < text.count("x" * 10) * 10 <= 200
    assert "error: evil\\x1b[2J" in lines


def test_a_long_setting_has_a_line_of_its_own():
    path = "/a folder/" + "x" * 40
    rows = [("model", "smollm2", "default"), ("hub cache", path, "variable HF_HOME")]
    assert shown(Settings(rows), 50).splitlines() == [
        "model      smollm2  default",
        "hub cache  variable HF_HOME",
        f"  {path}",
    ]
    assert shown(Settings(rows), 90).splitlines()[1] == f"hub cache  {path}  variable HF_HOME"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü 🎉", "plain ü 🎉"),
        ("a\tb\n", "a\tb\n"),
        ("\x1b[31mred\x07\r", "\\x1b[31mred\\x07\\x0d"),
        ("\x9b2J", "\\x9b2J"),
        ("\ud800", "\\ud800"),
        ("a\u061cb\u200e\u200f", "a\\u061cb\\u200e\\u200f"),
        ("\u202a\u202e\u2066\u2069", "\\u202a\\u202e\\u2066\\u2069"),
        ("\u206a\u206f", "\\u206a\\u206f"),
        ("👩\u200d🔬❤\ufe0f", "👩\u200d🔬❤\ufe0f"),
    ],
)
def test_text_for_a_terminal_cannot_drive_it(text, expected):
    assert theme.printable(text) == expected


def test_quoted_tokens_show_what_is_invisible():
    assert theme.quoted(" Paris\n") == '" Paris\\n"'
    assert theme.quoted("\u202eevil\u200b\u2028") == '"\\u202eevil\\u200b\\u2028"'
    assert theme.quoted("\U000e0001") == '"\\U000e0001"'


def test_confidence_has_a_colour_for_every_probability():
    assert [theme.confidence_style(p) for p in (1.0, 0.75, 0.3, 0.06, 0.01, 0.0, math.nan)] == [
        "green", "green", "cyan", "yellow", "red", "red", "red",
    ]  # fmt: skip
    assert shown(stats.confidence_legend()) == (
        "probability of each token: 75 % and more · 25 % · 5 % · less"
    )
