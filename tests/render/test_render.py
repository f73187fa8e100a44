"""What is shown, printed to a console of fixed width and compared as text."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from llmcli.commands.env.report import (
    ConfigurationProblem,
    ConfigurationReport,
    ConfiguredOption,
    EnvironmentReport,
    Setting,
)
from llmcli.commands.env.view import Settings, render_environment
from llmcli.commands.generate.report import Statistics
from llmcli.commands.generate.view import full_stats, short_stats
from llmcli.reports.environment import Environment
from llmcli.reports.info import NO_FORMATS
from llmcli.reports.text import PhasePeak, Timings
from llmcli.ui import stats, theme


def shown(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


TIMINGS = Timings(
    import_s=1.0, load_s=0.24, first_token_s=0.0521, prompt_tokens=12, prompt_tokens_per_s=230.3,
    generated_tokens=64, generated_tokens_per_s=41.234, peak_memory_bytes=432 * 2**20,
)  # fmt: skip


MACHINE = Environment(
    llmcli="0", python="3", platform="x", processor="p", cores=2, features=(), memory_bytes=None,
    gpus=(), driver=None, torch="2.9", threads=2, kernel_level="none",
)  # fmt: skip
RUN = Statistics(
    timings=TIMINGS, environment=MACHINE, sampling={}, seed=1403840134,
    model={
        "name": "m", "weight_format": "bfloat16", "activation_format": "bfloat16",
        "product_format": "bfloat16", "stored_formats": [], "device": "cpu",
    },
)  # fmt: skip


def test_short_statistics_are_one_line_of_80_columns():
    assert shown(short_stats(RUN, 80)) == (
        "prompt 12 tokens, 52.1 ms · generated 64, 41.2 tok/s · 432 MiB · seed 1403840134"
    )


def test_short_statistics_say_what_ended_the_text():
    drafted = {"proposed": 4, "accepted": 1, "speedup": None, "stopped": False}
    line = shown(short_stats(replace(RUN, speculation=drafted, ended="-n 64"), 300), 300)
    assert "generated 64 (-n 64), 41.2 tok/s · draft 1 of 4 tokens right (25%) · 432 MiB" in line


def test_a_draft_without_proposals_claims_no_speed():
    assert stats.draft_words({"proposed": 0, "accepted": 0}) == "proposed nothing"


def test_short_statistics_break_between_parts():
    assert shown(short_stats(replace(RUN, seed=None), 40), 40).splitlines() == [
        "prompt 12 tokens, 52.1 ms",
        "generated 64, 41.2 tok/s",
    ]


def test_statistics_of_a_run_that_wrote_nothing():
    nothing = replace(
        TIMINGS, first_token_s=None, prompt_tokens_per_s=None, generated_tokens=0,
        generated_tokens_per_s=None, peak_memory_bytes=None,
    )  # fmt: skip
    run = replace(RUN, timings=nothing, seed=None)
    assert shown(short_stats(run, 99), 99) == "prompt 12 tokens · generated 0"


def test_full_statistics_say_where_values_come_from():
    run = replace(RUN, sampling={"top_k": (40, "default")}, seed=None, side_by_side=3)
    text = shown(full_stats(run))
    assert "model            m (bfloat16 on cpu)" in text
    assert "path             3 texts side by side" in text
    assert "load             240 ms" in text
    assert "prompt           12 tokens, 230 tok/s" in text
    assert "top k            40  (default)" in text
    assert "seed             none: greedy" in text
    assert "of the process" not in text


def test_full_statistics_have_the_peak_of_every_phase_that_is_known():
    peaks = (
        PhasePeak(phase="base", resident_bytes=230 * 2**20, device_bytes=None),
        PhasePeak(phase="load", resident_bytes=None, device_bytes=300 * 2**20),
        PhasePeak(phase="prefill", resident_bytes=700 * 2**20, device_bytes=2**30),
    )
    text = shown(full_stats(replace(RUN, timings=replace(TIMINGS, peaks=peaks))))
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


@pytest.mark.parametrize(
    ("stored", "used", "line"),
    [
        (["F32", "Q4_1", "Q8_0"], "float32", "m (Q4_1, Q8_0 → float32 on cpu)"),
        (["F32"], "float32", "m (float32 on cpu)"), (["BF16"], "bfloat16", "m (bfloat16 on cpu)"),
        ([], "float32", "m (float32 on cpu)"),
    ],
)  # fmt: skip
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
        "activation_format": "float32", "cache_format": "float16", "product_format": "int16",
    }  # fmt: skip
    line = f"m ({words} on cpu: int16 products, float32 activations, float16 cache)"
    assert stats.model_line(model) == line


def test_environment_never_reads_markup_or_codes():
    environment = Environment(
        llmcli="0.1.0", python="3.12.1", platform="Linux", processor="CPU [bold]", cores=8,
        features=("avx2",), memory_bytes=2**34, gpus=(), driver=None, torch=None,
        kernel_level="avx2",
    )  # fmt: skip
    settings = (
        Setting(
            name="model", value=None, words="evil\x1b[2J", source="environment",
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
        ("plain ü 🎉", "plain ü 🎉"), ("a\tb\n", "a\tb\n"),
        ("\x1b[31mred\x07\r", "\\x1b[31mred\\x07\\x0d"), ("\x9b2J", "\\x9b2J"),
        ("\ud800", "\\ud800"), ("a\u061cb\u200e\u200f", "a\\u061cb\\u200e\\u200f"),
        ("\u202a\u202e\u2066\u2069", "\\u202a\\u202e\\u2066\\u2069"),
        ("\u206a\u206f", "\\u206a\\u206f"), ("👩\u200d🔬❤\ufe0f", "👩\u200d🔬❤\ufe0f"),
    ],
)  # fmt: skip
def test_text_for_a_terminal_cannot_drive_it(text, expected):
    assert theme.printable(text) == expected


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        (" Paris", " Paris"), ("-", "'-"), ('=HYPERLINK("http://x")', '\'=HYPERLINK("http://x")'),
        ("@SUM(A1)", "'@SUM(A1)"), ("+1\n", "'+1\\n"), ("\uff1d1", "'\uff1d1"),
        ("\t=1\r\n", "\\t=1\\r\\n"),
        ("\x1b]0;own\x07\ud800\u202e", "\\x1b]0;own\\x07\\ud800\\u202e"),
    ],
)  # fmt: skip
def test_a_cell_of_a_table_is_a_line_and_no_formula(text, cell):
    assert theme.csv_cell(text) == cell


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
