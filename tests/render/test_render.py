"""What is shown, printed to a console of fixed width and compared as text."""

from __future__ import annotations

import math
from dataclasses import replace

from drawn import shown
from rich.text import Text

from llmcli.commands.explain.view import number
from llmcli.commands.generate.report import ComputePath, RunReport, SamplingReport
from llmcli.commands.generate.view import full_stats, short_stats
from llmcli.commands.tokens.view import TokensReport, render_tokens
from llmcli.records.info import NO_FORMATS
from llmcli.records.machine import Environment
from llmcli.records.models import ago
from llmcli.records.text import PhasePeak, Timings, TokenPiece
from llmcli.shell.sampling import DEFAULTS
from llmcli.ui import facts, numbers, theme
from llmcli.ui.facts import LETTERS, letter_lines
from llmcli.ui.numbers import brief, scaled, short

TIMINGS = Timings(
    import_s=1.0, load_s=0.24, first_token_s=0.0521, prompt_tokens=12, prompt_tokens_per_s=230.3,
    generated_tokens=64, generated_tokens_per_s=41.234, peak_memory_bytes=432 * 2**20,
)  # fmt: skip


MACHINE = Environment(
    llmcli="0", python="3", platform="x", processor="p", cores=2, features=(), memory_bytes=None,
    gpus=(), driver=None, torch="2.9", threads=2, kernel_level="none", triton="off",
)  # fmt: skip
FORMATS = {
    "weight_format": "bfloat16", "activation_format": "bfloat16", "product_format": "bfloat16",
}  # fmt: skip


def test_statistics(golden):
    peaks = (
        PhasePeak(phase="base", resident_bytes=230 * 2**20, device_bytes=None),
        PhasePeak(phase="load", resident_bytes=None, device_bytes=300 * 2**20),
        PhasePeak(phase="prefill", resident_bytes=700 * 2**20, device_bytes=2**30),
    )
    run = RunReport(
        timings=replace(TIMINGS, peaks=peaks),
        path=ComputePath(**FORMATS, cache_format="bfloat16", kernels=(), sequences=3),
        sampling=SamplingReport(
            **DEFAULTS | {"temperature": 0.25}, seed=1403840134, greedy=False, max_tokens=64,
            stop=(), ignored=(), origins={"temperature": "configuration file", "top_k": "default"},
        ),
    )  # fmt: skip
    model = {"name": "m", **FORMATS, "stored_formats": [], "device": "cpu"}

    def line(stored, used="float32", **formats):
        formats = dict.fromkeys(NO_FORMATS, used) | formats
        return facts.model_line({"name": "m", "stored_formats": stored, "device": "cpu", **formats})

    packed = {
        "weight_format": "Q4_1 + Q8_0", "activation_format": "float32", "cache_format": "float16",
        "product_format": "int16",
    }  # fmt: skip
    golden("statistics", {
        "in short, a line of 80 columns": shown(short_stats(run, "-n 64", 80), width=80),
        "with the peak of every phase that is known": shown(
            full_stats(run, [], model=model, environment=MACHINE)
        ),
        "a draft without proposals claims no speed":
            facts.draft_words({"proposed": 0, "accepted": 0}),
        "the line of a model says what became of its weights": [
            line(["F32", "Q4_1", "Q8_0"]), line(["F32"]), line(["BF16"], "bfloat16"), line([]),
            line(["F32", "Q4_1", "Q8_0"], **packed), line(["BF16"], **packed),
        ],
        "confidence has a colour for every probability": " ".join(
            theme.confidence_style(p) for p in (1.0, 0.75, 0.3, 0.06, 0.01, 0.0, math.nan)
        ),
        "its legend": shown(facts.confidence_legend()),
    })  # fmt: skip


def table(function, *values):
    """Each value with what the function makes of it; signs that are not seen are spelled."""
    return [f"{value!a}: {function(value)!a}" for value in values]


def test_numbers_and_texts(golden):
    """Text for a terminal cannot drive it; a cell of a table is a line and no formula."""
    golden("words", {
        "durations": table(numbers.duration, 0.0000123, 0.0521, 0.4, 0.9996, 12.345, 125.9),
        "sizes": table(
            numbers.size, 0, 1023, 1024, 432 * 2**20, 1023 * 2**20, 25276510208, 2**41
        ),
        "for a terminal": table(
            theme.printable, "plain ü 🎉", "a\tb\n", "\x1b[31mred\x07\r", "\x9b2J", "\ud800",
            "a\u061cb\u200e\u200f", "\u202a\u202e\u2066\u2069", "\u206a\u206f",
            "👩\u200d🔬❤\ufe0f",
        ),
        "cells of CSV": table(
            theme.csv_cell, " Paris", "-", '=HYPERLINK("http://x")', "@SUM(A1)", "+1\n", "\uff1d1",
            "\t=1\r\n", "\x1b]0;own\x07\ud800\u202e",
        ),
        "quoted": table(theme.quoted, " Paris\n", "\u202eevil\u200b\u2028", "\U000e0001"),
        "shares": table(numbers.probability, 1.0, 0.0034, 0.000082, 1.6e-7, 0),
        "numbers with a prefix": table(scaled, 0, 0.25, 999.6, 36.8e6, 2e12, 37),
        "ages": table(
            ago, -5, 59, 60, 7200, 86400.0, 59 * 86400.0, 61 * 86400.0, 400 * 86400.0, 800 * 86400.0
        ),
        "in cells of heatmaps":
            table(brief, 0.0, 0.004, -0.004, 0.07, 0.994, 0.996, -0.5, -3.44, 9.96, -123.4),
        "of heads, shares": table(lambda value: short(value, True), 0.07, 0.999, 0.0, 1.0),
        "of heads": table(lambda value: short(value, False), 7.434, 9.999, 99.96, 1234.4),
        "derived": table(number, -1234.5678, -0.0, 1.25e-9, float("-inf")),
        "derived, to the last bit": number(1 / 3, 17),
        "of timing": [
            *table(numbers.percent, 0.71, 0.083, 0.0004, 0.0),
            *table(numbers.signed_percent, 1.012, 0.996), *table(numbers.speed, 1234.5, 5.118),
            *table(lambda value: numbers.unit(value, "B"), 538e6, 999, 1.5e12),
            *table(lambda of: numbers.rate(*of), (2e9, 0.1), (0, 1.0), (5, 0.0)),
            *table(lambda s: numbers.milliseconds(s, numbers.digits_for([s])), 0.0123456, 1.23456),
            numbers.milliseconds(0.123456, numbers.digits_for([0.123])),
        ],
        "letters with their other names": [
            line
            for sizes in ([("n", 4), ("h_kv", 1), ("b", 1), ("v", 2048)], [("n", 1), ("h", 1)])
            for line in letter_lines(sizes)
        ],
        "letters of one model": letter_lines([("d", 256), ("d/h", 32), ("F", 1024)]),
        "of an odd one":
            letter_lines([("d", 576), ("d/h", 8), ("d_v", 6), ("F", 1536)]),
    })  # fmt: skip


def test_no_letter_means_two_things():
    # d/h and d_k are the same thing, and a model has one of them
    names = [
        name
        for letter, (_, others) in LETTERS.items()
        if letter != "d_k"
        for name in (letter, *others)
    ]
    assert {name for name in names if names.count(name) > 1} == {"d_v"}, "left out beside d_v"


def test_a_long_text_is_drawn_line_by_line_and_not_cell_by_cell(monkeypatch):
    """A `Text` for every cell took most of the time and the memory of a text of megabytes."""
    one = TokenPiece(id=40, text="hi", bytes="6869", start=0, end=2, special=False)
    report = TokensReport(
        text="hi", rendered=None, bytes=6, vocabulary=99, bos=1, adds_bos=True, eos=(2,),
        tokens=(one,) * 2000,
    )  # fmt: skip
    made = []
    begin = Text.__init__
    monkeypatch.setattr(Text, "__init__", lambda *a, **k: made.append(1) or begin(*a, **k))
    lines = shown(render_tokens(report, every=True), width=99).splitlines()
    assert len(made) < 100
    assert len(lines) == 2 + 2 + 2000
    assert lines[2002].split() == ["1998", "40", '"hi"', "0–2"]
