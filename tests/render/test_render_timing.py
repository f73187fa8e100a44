"""`timing` as text at fixed widths: what it says is in the report, and what is wrong is seen."""

from __future__ import annotations

import re
from dataclasses import replace

from drawn import changes, printed
from timing_reports import CEILINGS, overhead, timing_report

from llmcli.commands.timing.view.screen import render_opening, render_timing
from llmcli.records.ceilings import ReadRate
from llmcli.records.environment import Environment

TITLE = "m (float32 on cpu)"
MACHINE = Environment(
    llmcli="1.0", python="3.12.0", platform="Linux", processor="A Processor", cores=4,
    features=("avx2",), memory_bytes=8 << 30, gpus=(), driver=None, torch="2.9", cuda=None,
    threads=2, kernels=("torch linear",), kernel_level="not built (no compiler)",
)  # fmt: skip
REPORT = timing_report()
PREFILL, DECODE = REPORT.phases
SLOW = timing_report(slow={(2, "ffn_up"): 0.005})
WAVERING = timing_report(slow={(1, "residual"): 2e-5})  # twice as long, of 1.15 ms a layer


def shown(report=REPORT, width=200, layers=False, title=TITLE, details=True, **console):
    """All that a run prints: what is known before it, and what was measured."""
    about = {"weight_bytes": report.weight_bytes, "weight_format": report.dtype}
    opening = render_opening(title, MACHINE, report.stages, about if details else None)
    text = printed(
        opening, render_timing(report, layers=layers, details=details), width=width, **console
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def brief(report=REPORT, width=80):
    """Both phases side by side."""
    return shown(report, width=width, details=False)


def decode_alone(**changed):
    return replace(REPORT, phases=(replace(DECODE, **changed),))


def both(prefill=PREFILL, decode=DECODE):
    return replace(REPORT, phases=(prefill, decode))


def parts(phase, chosen, **changed):
    """The totals of a phase, with other values of some parts."""
    return tuple(
        replace(part, **changed) if chosen(part) else part for part in phase.totals
    )


def test_screens(golden):
    """Of both phases, and what changes with the report."""
    decode = shown(decode_alone())
    far = parts(DECODE, lambda part: part.bound == "memory", bound="kernel", of_bound=0.2)
    costly = replace(PREFILL, overhead=overhead(1.2, 1.3, 1.38, 1.5, 1.6))
    alike = replace(DECODE.work, flops_full=DECODE.work.flops)
    more = (*CEILINGS.reads[:2], ReadRate(nbytes=32 << 20, bytes_per_s=41e9, level="L3"))
    smallest = replace(CEILINGS, reads=(*more, *CEILINGS.reads[2:]))
    beyond = parts(PREFILL, lambda part: part.part == "qkv", of_bound=14.7)
    behind = tuple(replace(part, host_s=part.seconds / 2) for part in DECODE.totals)
    much = parts(  # ten parts of 5 % and more, where seven stay whatever they take
        PREFILL, lambda part: part.part in ("embed", "norm", "ffn_act", "residual"),
        seconds=0.06 * sum(part.seconds for part in PREFILL.totals),
    )  # fmt: skip
    seconds = sum(part.seconds for part in much)
    much = replace(PREFILL, seconds=seconds, totals=tuple(
        replace(part, share=part.seconds / seconds) for part in much
    ))  # fmt: skip
    few = [replace(phase, totals=phase.totals[:8]) for phase in REPORT.phases]
    long = replace(PREFILL, calls=3, tokens=4800)
    single, loose, straddling = overhead(1.014), overhead(1.0, 1.2, 1.4), overhead(0.9, 1.1)

    def new(report, **how):
        return changes(shown(**how), shown(report, **how))

    def by_layer(phase):
        text = shown(replace(REPORT, phases=(phase,)), 140, layers=True)
        return ["layer" + text.partition("\nlayer")[2].partition("\nceilings")[0]]

    golden("timing", {
        "what is known before anything is timed, the answers, and each part: the sum is below it,"
        " without work there are no rates": shown(),
        "both phases fit a small terminal, with the checks and a prompt: the largest parts, and"
        " the others together": brief(),
        "by layer: a delay in one is seen there and nowhere else": by_layer(SLOW.phases[0]),
        "without their table the slowest layer is named":
            [line for line in shown(SLOW).split("\n") if "slowest" in line],
        "a small part that wavers is no outlier":
            [line for line in by_layer(WAVERING.phases[0])[0].split("\n") if "*" in line],
        "layers that are alike have no marks; the slowest come first": by_layer(DECODE),
        "in 60 columns layers keep the parts that take longest": changes(
            shown(decode_alone(), 60), shown(decode_alone(), 60, layers=True)
        ),
        "a kernel that is near nothing is said to be": changes(
            decode, shown(decode_alone(totals=far))
        ),
        "an overhead within noise": changes(decode, shown(decode_alone(overhead=straddling))),
        "the headline is of the run that the table is of, however much its clocks cost":
            new(both(costly)) + changes(brief(), brief(both(costly))),
        "both conventions of FLOPs are one": changes(decode, shown(decode_alone(work=alike))),
        "a step that lies in a cache": new(timing_report(working_set=7_590_000)),
        "a cache that was read in several sets has the rate of the smallest": [
            line for line in shown(timing_report(ceilings=smallest)).split("\n") if "L3" in line
        ],
        "parts beyond their ceiling are told": new(both(replace(PREFILL, totals=beyond))),
        "an exact estimate": new(timing_report(estimated=500 << 20)),
        "an unknown peak": new(timing_report(peak=None)),
        "an unknown base": new(timing_report(base=None)),
        "the memory of a GPU": new(timing_report(ceilings=replace(CEILINGS, device="cuda:0"))),
        "a device behind its host has the host's time, too": changes(
            decode, shown(decode_alone(totals=behind))
        )[1:4],
        "no part with much of the time is among the others": brief(both(much)).split("\n")[8:],
        "few parts are all shown": brief(both(*few)).split("\n")[8:],
        "times that are not tight say so": changes(
            brief(width=200),
            brief(both(replace(PREFILL, overhead=single), replace(DECODE, overhead=loose)), 200),
        ),
        "a long prompt": shown(replace(REPORT, phases=(long,))).split("\n")[5],
        "interrupted before any phase: the ceilings and the memory are there": shown(
            timing_report(phases=(), checks=(), interrupted=True)
        ),
        "interrupted before the decoding":
            shown(timing_report(phases=(PREFILL,), interrupted=True), 120),
        "columns go in an order that is chosen": [
            " | ".join(headings(text)) for text in (
                *(shown(decode_alone(), width) for width in (200, 100, 60, 40)),
                *(brief(width=width) for width in (120, 80, 50, 40)),
            )
        ],
        "a title with control characters is one line": shown(title="m\x1b[2J\n").split("\n")[0],
    })  # fmt: skip


def headings(text):
    line = next(line for line in text.splitlines() if line.startswith("ms by part"))
    return re.split(r" {2,}", line)


def test_numbers_stay_with_their_units():
    for width in range(48, 90):
        for line in shown(decode_alone(), width=width).splitlines():
            assert not re.match(r"\s*(%|[kMG]?B\b|[kMGT]?FLOP\b|ms\b(?! by))", line), (width, line)


def test_with_ascii_alone_bars_are_of_its_signs():
    assert "█" in shown()
    bars = [line for line in shown(encoding="ascii").splitlines() if line.startswith("ffn_up")]
    assert ["#" in bar and bar.isascii() for bar in bars] == [True, True]
