"""What is shown, printed to a console of fixed width and compared as text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from drawn import shown

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


def test_statistics(golden):
    nothing = replace(
        TIMINGS, first_token_s=None, prompt_tokens_per_s=None, generated_tokens=0,
        generated_tokens_per_s=None, peak_memory_bytes=None,
    )  # fmt: skip
    greedy = replace(RUN, seed=None)
    drafted = {"proposed": 4, "accepted": 1, "speedup": None, "stopped": False}
    peaks = (
        PhasePeak(phase="base", resident_bytes=230 * 2**20, device_bytes=None),
        PhasePeak(phase="load", resident_bytes=None, device_bytes=300 * 2**20),
        PhasePeak(phase="prefill", resident_bytes=700 * 2**20, device_bytes=2**30),
    )
    full = replace(greedy, sampling={"top_k": (40, "default")}, side_by_side=3)

    def short(run, width=300):
        return shown(short_stats(run, width), width=width)

    def line(stored, used="float32", **formats):
        formats = dict.fromkeys(NO_FORMATS, used) | formats
        return stats.model_line({"name": "m", "stored_formats": stored, "device": "cpu", **formats})

    packed = {
        "weight_format": "Q4_1 + Q8_0", "activation_format": "float32", "cache_format": "float16",
        "product_format": "int16",
    }  # fmt: skip
    golden("statistics", {
        "in short, a line of 80 columns": short(RUN, 80),
        "what ended the text, and a draft": short(replace(RUN, speculation=drafted, ended="-n 64")),
        "it breaks between parts": short(greedy, 40),
        "of a run that wrote nothing": short(replace(greedy, timings=nothing)),
        "in full, with where values come from": shown(full_stats(full)),
        "with the peak of every phase that is known":
            shown(full_stats(replace(full, timings=replace(TIMINGS, peaks=peaks)))),
        "a draft without proposals claims no speed":
            stats.draft_words({"proposed": 0, "accepted": 0}),
        "the line of a model says what became of its weights": [
            line(["F32", "Q4_1", "Q8_0"]), line(["F32"]), line(["BF16"], "bfloat16"), line([]),
            line(["F32", "Q4_1", "Q8_0"], **packed), line(["BF16"], **packed),
        ],
        "confidence has a colour for every probability": " ".join(
            theme.confidence_style(p) for p in (1.0, 0.75, 0.3, 0.06, 0.01, 0.0, math.nan)
        ),
        "its legend": shown(stats.confidence_legend()),
    })  # fmt: skip


def test_environment(golden):
    """What is in the environment is never read as markup or codes."""
    environment = Environment(
        llmcli="0.1.0", python="3.12.1", platform="Linux", processor="CPU [bold]", cores=8,
        features=("avx2",), memory_bytes=2**34, gpus=(), driver=None, torch=None,
        kernel_level="avx2",
    )  # fmt: skip
    settings = [
        Setting(name=name, value=None, words=words, source=source, origin=origin)
        for name, words, source, origin in (
            ("model", "evil\x1b[2J", "environment", "LLMCLI_MODEL"),
            ("seed", "3", "flag", "--seed"), ("dtype", "auto", "default", ""),
        )
    ]  # fmt: skip
    configuration = ConfigurationReport(
        path="/c.toml", exists=True,
        options=(ConfiguredOption(command="chat", option="system", value="\x9b2J" + "x" * 300),),
        problems=(ConfigurationProblem(message="evil\x1b[2J", hint=None),),
    )  # fmt: skip
    report = EnvironmentReport(
        environment=environment, settings=tuple(settings), configuration=configuration
    )
    path = "/a folder/" + "x" * 40
    rows = [("model", "smollm2", "default"), ("hub cache", path, "variable HF_HOME")]
    golden("env", {
        "values that are cut, and codes that are spelled": shown(render_environment(report)),
        "a long setting has a line of its own where there is no room":
            shown(Settings(rows), width=50),
        "and none where there is": shown(Settings(rows), width=90),
    })  # fmt: skip


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
