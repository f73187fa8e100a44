"""`timing` as text at fixed widths: what it says is in the report, and what is wrong is seen."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from timing_reports import CEILINGS, IN_LAYERS, LAYERS, timing_report

from llmcli.commands.timing.view.layers import outliers, times_by_layer
from llmcli.commands.timing.view.screen import render_opening, render_timing
from llmcli.reports.ceilings import ReadRate
from llmcli.reports.environment import Environment
from llmcli.ui.rates import (
    digits_for,
    milliseconds,
    percent,
    rate,
    signed_percent,
    speed,
    unit,
)

TITLE = "m (float32 on cpu)"
COLUMNS = ["part", "ms a token", "share", "", "FLOPs", "bytes", "GB/s", "GFLOP/s",
           "bound by", "of ceiling", "nearest"]  # fmt: skip
MACHINE = Environment(
    llmcli="1.0", python="3.12.0", platform="Linux", processor="A Processor", cores=4,
    features=("avx2",), memory_bytes=8 << 30, gpus=(), driver=None, torch="2.9", cuda=None,
    threads=2, kernels=("torch linear",), kernel_level="not built (no compiler)",
)  # fmt: skip


def shown(report=None, width=200, layers=False, title=TITLE, details=True, **console):
    """All that a run prints: what is known before it, and what was measured."""
    file, report = io.StringIO(), report or timing_report()
    screen = Console(file=file, width=width, highlight=False, **console)
    about = {"weight_bytes": report.weight_bytes, "weight_format": report.dtype}
    screen.print(
        render_opening(title, MACHINE, report.stages, about, details=details),
        render_timing(report, layers=layers, details=details), crop=False,
    )  # fmt: skip
    return [line.rstrip() for line in file.getvalue().splitlines()]


def phase_lines(lines, name):
    """The table of a phase and what is said below it."""
    first = next(at for at, line in enumerate(lines) if line.startswith(f"{name}, instrumented"))
    after = ("decode, instrumented", "ceilings of")
    ends = [at for at, line in enumerate(lines) if line.startswith(after)]
    return lines[first : next(at for at in ends if at > first)]


def summary(lines, name):
    """The answer of a phase: its headline and what is below it."""
    first = next(at for at, line in enumerate(lines) if line.startswith(f"{name}: "))
    ends = [at for at, line in enumerate(lines) if at > first and not line.startswith("  ")]
    return lines[first : ends[0]]


def rows(lines, first="part"):
    """{first cell: cells} of the table that begins with that heading."""
    begin = next(at for at, line in enumerate(lines) if re.match(rf" *{first}  ", line))
    found = {}
    for line in lines[begin + 2 :]:
        if not line or (line[0].isalpha() and "  " not in line):
            break
        cells = re.split(r" {2,}", line.strip())
        found[cells[0]] = cells
        if cells[0] == "all":
            break
    return found


def test_every_part_with_its_time_and_the_sum_of_them():
    report = timing_report()
    lines = shown(report)
    for phase in report.phases:
        table = rows(phase_lines(lines, phase.name))
        assert list(table) == [part.part for part in phase.totals] + ["all"]
        tokens = phase.tokens if phase.name == "decode" else 1
        printed = [float(cells[1]) for cells in table.values()]
        assert printed[-1] == pytest.approx(phase.seconds / tokens * 1e3, abs=5e-4)
        assert sum(printed[:-1]) == pytest.approx(printed[-1], abs=5e-4 * len(printed))
        for part in phase.totals:
            assert f"{part.seconds / tokens * 1e3:.3f}" == table[part.part][1]
            assert percent(part.seconds / phase.seconds) in table[part.part]
        assert table["gaps"][0] == "gaps"


def test_rates_and_what_a_part_waits_for():
    report = timing_report()
    decode = report.phases[1]
    qkv = next(part for part in decode.totals if part.part == "qkv")
    cells = rows(phase_lines(shown(report), "decode"))["qkv"]
    assert cells[-7:] == ["8 M", "16 MB", "20", "10", "memory", "75 %", "memory"]
    assert rows(phase_lines(shown(report), "decode"))["norm"][-3:] == ["calls", "4.0 %", "memory"]
    assert qkv.work.flops / 8 == 8e6
    assert qkv.work.bytes / qkv.seconds == pytest.approx(20.02e9, rel=1e-3)
    assert rows(phase_lines(shown(report), "prefill"))["qkv"][-7:-5] == ["96 M", "16.2 MB"]
    assert rows(phase_lines(shown(report), "decode"))["rope"][-1] == "█", "no work, no rates"


def test_what_is_known_before_anything_is_timed():
    lines = shown()
    assert lines[:3] == [
        TITLE,
        "A Processor · 4 cores · torch 2.9 · 2 threads · kernels not built · llmcli 1.0",
        "start-up: import torch 1.20 s · read the headers 21 ms · load the weights 400 ms "
        "(100 MB of file → 84 MB float32, 250 MB/s) · tokenize 1.1 ms",
    ]
    assert lines[4] == ""


def test_the_answer_comes_first():
    lines = shown()
    assert lines[5:13] == summary(lines, "prefill") + summary(lines, "decode")
    assert summary(lines, "decode") == [
        "decode: 8 tokens after 12 · 175 tok/s · 5.71 ms a token",
        "  most time in ffn_up 28 % · head 18 % · qkv 14 %",
        "  GEMV (one row times a weight matrix): 17 a token, 81 % of the time",
        "  bound by memory 81 % · calls 13 % (starting operations) · "
        "61 % of the ceilings, which allow 3.48 ms a token",
    ]
    assert summary(lines, "prefill")[:3] == [
        "prefill: 12 tokens · 2,120 tok/s · 5.66 ms",
        "  most time in ffn_up 28 % · head 18 % · qkv 14 %",
        "  GEMM (many rows times one): 16, 64 % of the time · "
        "GEMV (one row times a weight matrix): 1, 18 % of the time",
    ]


def test_a_kernel_that_is_near_nothing_is_said_to_be():
    report = timing_report()
    totals = tuple(
        replace(part, bound="kernel", of_bound=0.2) if part.bound == "memory" else part
        for part in report.phases[1].totals
    )
    lines = shown(replace(report, phases=(replace(report.phases[1], totals=totals),)))
    assert summary(lines, "decode")[-1].startswith(
        "  bound by kernel 81 % (far from any ceiling) · calls 13 %"
    )


def test_the_instrumentation_overhead():
    report = timing_report()
    assert phase_lines(shown(report), "decode")[0] == (
        "decode, instrumented: 45.7 ms · overhead +1.4 % (quartiles +0.5 % … +2.3 %, 10 pairs)"
    )
    cost = replace(report.phases[1].overhead, quartiles=(0.98, 1.02))
    unsure = replace(report, phases=(replace(report.phases[1], overhead=cost),))
    assert phase_lines(shown(unsure), "decode")[0].endswith(
        "overhead +1.4 % (within noise: quartiles −2.0 % … +2.0 %, 10 pairs)"
    )


@pytest.mark.parametrize("details", [True, False])
def test_the_headline_is_of_the_run_that_the_table_is_of(details):
    report = timing_report()
    prefill = report.phases[0]
    slow = replace(prefill, bare_s=prefill.seconds / 1.38, overhead=replace(
        prefill.overhead, median=1.38, quartiles=(1.3, 1.5)))  # fmt: skip
    lines = shown(replace(report, phases=(slow, report.phases[1])), details=details)
    first = next(at for at, line in enumerate(lines) if line.startswith("prefill: "))
    assert f" · {prefill.seconds * 1e3:.2f} ms" in lines[first]
    assert lines[first - 2] == (
        "timing overhead: prefill +38.0 % (10 pairs); decode +1.4 % (10 pairs)"
    )
    table = rows(lines, "part" if details else "ms by part")
    assert float(table["all"][1]) == pytest.approx(prefill.seconds * 1e3, abs=0.005)


def test_reads_and_both_conventions_of_flops():
    lines = shown()
    assert phase_lines(lines, "prefill")[-2] == (
        "397 MFLOP (causal), 400 MFLOP (full square) · "
        "reads 84 MB of weights, 2.4 MB of cache · 4 layers of 1.15 ms, slowest 0 with 1.15 ms"
    )
    decode = next(line for line in phase_lines(lines, "decode") if "MFLOP" in line)
    assert decode.startswith("42.2 MFLOP a token (causal), 42.5 MFLOP (full square) · reads 84 MB")
    report = timing_report()
    work = replace(report.phases[1].work, flops_full=report.phases[1].work.flops)
    alike = shown(replace(report, phases=(replace(report.phases[1], work=work),)))
    assert any(line.startswith("42.2 MFLOP a token · reads ") for line in alike)


def test_a_delay_in_one_layer_is_seen_there_and_nowhere_else():
    report = timing_report(slow={(2, "ffn_up"): 0.005})
    lines = shown(report, layers=True)
    table = rows(phase_lines(lines, "prefill"), "layer")
    assert [name for name, cells in table.items() if any("*" in cell for cell in cells)] == ["2"]
    assert [cell for cell in table["2"] if "*" in cell] == ["5.400*"]
    assert "* more than 1.5 times the median of the layers" in lines
    prefill = phase_lines(shown(report), "prefill")
    assert any(line.endswith("4 layers of 1.15 ms, slowest 2 with 6.15 ms") for line in prefill)
    for phase in report.phases:
        parts = sorted({part.part for part in phase.parts})
        found = outliers(times_by_layer(phase), range(LAYERS), parts)
        assert found == {(2, "ffn_up")}


def test_layers_that_are_alike_have_no_marks():
    lines = shown(layers=True)
    assert not any("*" in line for line in lines)
    report = timing_report()
    for phase in report.phases:
        table = rows(phase_lines(lines, phase.name), "layer")
        assert sorted(list(table)[:-2]) == [str(layer) for layer in range(LAYERS)]
        assert list(table)[-2:] == ["-", "all"]
        slowest = [float(cells[1]) for name, cells in table.items() if name.isdigit()]
        assert slowest == sorted(slowest, reverse=True)
        tokens = phase.tokens if phase.name == "decode" else 1
        assert float(table["all"][1]) == pytest.approx(phase.seconds * 1e3 / tokens, abs=5e-4)
        of_layers = [float(cells[1]) for name, cells in table.items() if name != "all"]
        assert sum(of_layers) == pytest.approx(float(table["all"][1]), abs=3e-3)


def test_a_small_part_that_wavers_does_not_stand_out():
    report = timing_report(slow={(1, "residual"): 2e-5})
    times = times_by_layer(report.phases[0])
    assert times[1, "residual"] > 1.5 * times[0, "residual"]
    assert outliers(times, range(LAYERS), IN_LAYERS) == set()


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80, 100, 120, 140, 200])
@pytest.mark.parametrize("layers", [False, True])
def test_no_line_is_wider_than_the_terminal(width, layers):
    report = timing_report(slow={(2, "ffn_up"): 0.005})
    for line in shown(report, width=width, layers=layers):
        assert cell_len(line) <= width, line


def headings(width):
    line = next(line for line in phase_lines(shown(width=width), "decode") if "share" in line)
    return [name for name in re.split(r" {2,}", line) if name]


def test_columns_go_in_an_order_that_is_chosen():
    everything = [name for name in COLUMNS if name]
    assert headings(200) == everything
    assert headings(100) == everything[:-1]
    assert headings(60) == ["part", "ms a token", "share", "bound by", "of ceiling"]
    assert headings(40) == ["part", "ms a token", "share"]
    before = set(everything)
    for width in range(140, 39, -1):
        kept = headings(width)
        assert set(kept) <= before, "what has gone does not come back"
        assert kept == [name for name in everything if name in kept]
        before = set(kept)


def test_layers_keep_the_parts_that_take_longest():
    lines = phase_lines(shown(width=60, layers=True), "decode")
    names = next(line for line in lines if line.startswith("layer")).split()
    assert names == ["layer", "all", "qkv", "ffn_up", "ffn_down", "head"]
    left_out = "the smallest parts are left out: there is no room for them"
    assert left_out in " ".join(lines)
    assert left_out not in " ".join(shown(layers=True))


def test_numbers_stay_with_their_units():
    for width in range(48, 90):
        for line in shown(width=width):
            assert not re.match(r"\s*(%|[kMG]?B\b|[kMGT]?FLOP\b|ms\b)", line), (width, line)


def test_without_colours_and_with_ascii_alone():
    plain = shown(no_color=True)
    assert plain == shown()
    assert "█" in "".join(plain)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    screen = Console(file=ascii_only, width=140, highlight=False)
    screen.print(render_timing(timing_report(), details=True))
    ascii_only.flush()
    text = ascii_only.buffer.getvalue().decode()
    bars = [line for line in text.splitlines() if line.startswith("ffn_up")]
    assert ["#" in bar and "?" not in bar for bar in bars] == [True, True]


def test_what_the_machine_can_do_and_where_a_step_reads():
    lines = shown()
    assert (
        "ceilings of this machine (cpu, 2 threads) · memory 20 GB/s · L3 (32 MiB) 60 GB/s · "
        "L2 (2 MiB) 120 GB/s · float32 matrix products 200 GFLOP/s · "
        "bfloat16 matrix products 150 GFLOP/s (through float32)"
    ) in lines
    assert (
        "a step's 84.4 MB come from memory at 20 GB/s: no cache holds them (at most 32 MiB)"
    ) in lines
    small = shown(timing_report(working_set=7_590_000))
    assert "a step's 7.59 MB lie in L3: judged by its 60 GB/s, not by the memory's rate" in small


def test_a_cache_with_several_sets_has_the_rate_of_the_smallest():
    more = (*CEILINGS.reads[:2], ReadRate(nbytes=32 << 20, bytes_per_s=41e9, level="L3"))
    ceilings = replace(CEILINGS, reads=(*more, *CEILINGS.reads[2:]))
    lines = shown(timing_report(ceilings=ceilings))
    line = next(line for line in lines if line.startswith("ceilings of"))
    assert "L3 (32 MiB) 60 GB/s" in line
    assert "41" not in line


def test_parts_beyond_their_ceiling_are_told():
    report = timing_report()
    assert not any("faster than their ceiling" in line for line in shown(report))
    phase = report.phases[0]
    totals = tuple(
        replace(part, of_bound=14.7) if part.part == "qkv" else part for part in phase.totals
    )
    wrong = replace(report, phases=(replace(phase, totals=totals), report.phases[1]))
    told = [line for line in shown(wrong) if line.startswith("faster than their ceiling")]
    assert told == [
        "faster than their ceiling: qkv (prefill); something else took the machine while the "
        "ceilings were measured: run it again"
    ]


def test_memory_of_every_phase_and_the_estimate():
    known = "base 200 MiB · load 650 MiB · prefill 700 MiB · decode 700 MiB"
    taken = "the model took 500 MiB, estimated"
    assert f"peak resident memory (RSS): {known} · {taken} 490 MiB (2.0 % less)" in shown()
    exact = shown(timing_report(estimated=500 << 20))
    assert any(line.endswith(f"{taken} 500 MiB (exactly)") for line in exact)
    for unknown in ({"peak": None}, {"base": None}):
        lines = shown(timing_report(**unknown))
        assert any(line.endswith("estimated for the model 490 MiB") for line in lines)
    gpu = replace(CEILINGS, device="cuda:0")
    assert any(line.startswith("peak memory of the device: ") for line in shown(
        timing_report(ceilings=gpu)))  # fmt: skip


def test_pieces_of_what_is_fused():
    assert (
        "attention took 0.6 ms a token fused; apart its pieces take: scores 0.25 ms, "
        "mask and softmax 0.375 ms, mix 0.125 ms"
    ) in phase_lines(shown(), "decode")


def test_a_device_behind_its_host_has_the_host_s_time_too():
    report = timing_report()
    phase = report.phases[1]
    totals = tuple(replace(part, host_s=part.seconds / 2) for part in phase.totals)
    lines = shown(replace(report, phases=(replace(phase, totals=totals),)))
    heading = next(line for line in lines if line.startswith("part"))
    assert "host ms" in heading
    assert not any("host ms" in line for line in shown())


def brief(report=None, **options):
    """Both phases side by side; the lines of the run's start-up come first."""
    return shown(report, details=False, **options)


def test_both_phases_fit_a_small_terminal():
    """With the line of the checks and the prompt of the shell."""
    lines = brief(width=80)
    assert max(map(cell_len, lines)) <= 80
    below = ["", "✓ 5 checks · --checks", "note: other programs took …", "  … faster", "$ "]
    assert len(lines) + len(below) <= 24
    assert lines[2] == "start-up: torch 1.20 s, headers 21 ms, weights 400 ms, tokenize 1.1 ms"
    assert lines[3:8] == [
        "timing overhead: prefill +1.4 % (10 pairs); decode +1.4 % (10 pairs)",
        "",
        "prefill: 12 tokens · 2,120 tok/s · 5.66 ms · most in ffn_up 28 %",
        "decode: 8 tokens after 12 · 175 tok/s · 5.71 ms a token · most in ffn_up 28 %",
        "ms by part   prefill   share   bound by      per token   share   bound by",
    ]
    assert lines[-1] == (
        "ceilings: memory 20 GB/s, float32 products 200 GFLOP/s · peak memory 700 MiB"
    )


def test_the_largest_parts_and_the_others_add_up_to_each_phase():
    report = timing_report()
    table = rows(brief(report, width=80), "ms by part")
    names = [part.part for part in report.phases[1].totals]
    small = ["embed", "norm", "ffn_act", "residual", "sample", "gaps"]
    assert list(table) == [name for name in names if name not in small] + ["6 others", "all"]
    assert table["qkv"] == ["qkv", "0.80", "14 %", "memory 75 %", "0.80", "14 %", "memory 75 %"]
    for phase in report.phases:
        tokens = phase.tokens if phase.name == "decode" else 1
        printed = [
            float(cells[1 if phase.name == "prefill" else 1 + len(cells) // 2])
            for name, cells in table.items()
            if name != "6 others"
        ]
        others = sum(part.seconds for part in phase.totals if part.part in small) * 1e3 / tokens
        assert sum(printed[:-1]) + others == pytest.approx(printed[-1], abs=0.005 * len(printed))
        assert printed[-1] == pytest.approx(phase.seconds * 1e3 / tokens, abs=0.005)


def test_no_part_with_much_of_the_time_is_among_the_others():
    """Ten parts of 5 % and more, where seven stay whatever they take."""
    report = timing_report()
    prefill = report.phases[0]
    total = sum(part.seconds for part in prefill.totals)
    much = ["embed", "norm", "ffn_act", "residual"]
    totals = tuple(
        replace(part, seconds=0.06 * total) if part.part in much else part
        for part in prefill.totals
    )
    slow = replace(prefill, totals=totals, seconds=sum(part.seconds for part in totals))
    table = list(rows(brief(replace(report, phases=(slow, report.phases[1]))), "ms by part"))
    assert {*much} < {*table}
    assert table[-2:] == ["3 others", "all"]


def test_few_parts_are_all_shown():
    report = timing_report()
    phases = tuple(replace(phase, totals=phase.totals[:8]) for phase in report.phases)
    assert list(rows(brief(replace(report, phases=phases)), "ms by part")) == [
        *(part.part for part in phases[0].totals), "all"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (120, ["ms by part", *["prefill", "share", "GB/s", "GFLOP/s", "bound by"],
               *["per token", "share", "GB/s", "GFLOP/s", "bound by"]]),
        (80, ["ms by part", "prefill", "share", "bound by", "per token", "share", "bound by"]),
        (50, ["ms by part", "prefill", "share", "per token", "share"]),
        (40, ["ms by part", "prefill", "per token"]),
    ],
)  # fmt: skip
def test_columns_of_both_phases_go_together(width, kept):
    lines = brief(width=width)
    assert max(map(cell_len, lines)) <= width
    heading = next(line for line in lines if line.startswith("ms by part"))
    assert re.split(r" {2,}", heading) == kept


def test_times_that_are_not_tight_say_so():
    report = timing_report()
    loose = replace(report.phases[1].overhead, watched_s=(1.0, 1.2, 1.4), bare_s=(1.0, 1.0, 1.0),
                    ratios=(1.0, 1.2, 1.4))  # fmt: skip
    single = replace(loose, watched_s=(1.0,), bare_s=(1.0,), ratios=(1.0,))
    phases = (replace(report.phases[0], overhead=single), replace(report.phases[1], overhead=loose))
    line = brief(replace(report, phases=phases))[3]
    assert line.endswith("prefill +1.4 % (1 pair); decode +1.4 % (3 pairs, quartiles 17 %)")


def test_several_sequences_and_a_long_prompt():
    report = timing_report(batch=4)
    long = replace(report.phases[0], calls=3, tokens=4800)
    lines = shown(replace(report, phases=(long,)))
    assert lines[5].startswith("prefill: 4,800 tokens of 4 sequences in 3 calls · ")


def test_what_was_finished_before_an_interruption():
    """The ceilings and the memory are there without any phase."""
    report = timing_report(phases=(), checks=(), splits=(), interrupted=True)
    lines = shown(report)
    assert lines[3] == ""
    assert lines[4].startswith("ceilings of this machine")
    assert not any("✓" in line or "instrumented" in line for line in lines)
    one = shown(timing_report(phases=timing_report().phases[:1], interrupted=True))
    assert [line for line in one if line.startswith("decode")] == []
    assert len(summary(one, "prefill")) == 4


def test_a_title_with_control_characters_is_one_line():
    assert shown(title="m\x1b[2J\n")[0] == "m\\x1b[2J\\n"


def test_numbers():
    assert [percent(x) for x in (0.71, 0.083, 0.0004, 0.0)] == ["71 %", "8.3 %", "0.04 %", "0.0 %"]
    assert [signed_percent(x) for x in (1.012, 0.996)] == ["+1.2 %", "−0.4 %"]
    assert [unit(x, "B") for x in (538e6, 999, 1.5e12)] == ["538 MB", "999 B", "1.5 TB"]
    assert [rate(2e9, 0.1), rate(0, 1.0), rate(5, 0.0)] == ["20", "", ""]
    assert [speed(x) for x in (1234.5, 5.118)] == ["1,234 tok/s", "5.12 tok/s"]
    assert milliseconds(0.0123456, digits_for([0.0123])) == "12.346"
    assert milliseconds(1.23456, digits_for([1.23])) == "1,234.6"
    assert milliseconds(0.123456, digits_for([0.123])) == "123.46"
