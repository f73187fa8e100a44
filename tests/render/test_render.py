"""What is shown, printed to a console of fixed width and compared as text."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from llmcli.reports.environment import (
    ConfigurationProblem,
    ConfigurationReport,
    ConfiguredOption,
    Environment,
    EnvironmentReport,
    Setting,
)
from llmcli.reports.info import NO_FORMATS
from llmcli.reports.text import PhasePeak, Timings
from llmcli.ui import stats, theme
from llmcli.ui.environment import Settings, render_environment


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
    assert "processor CPU [bold]" in lines
    assert "memory 16 GiB" in lines
    assert "PyTorch not installed" in lines
    assert "model evil\\x1b[2J variable LLMCLI_MODEL" in lines
    assert "seed 3 flag --seed" in lines
    assert "dtype auto default" in lines
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
