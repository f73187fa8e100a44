"""The Markdown table to the character, and the second table in a wide and a narrow terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from llmcli.commands.bench.report.fields import Bencher, percentile
from llmcli.commands.bench.report.results import (
    Against,
    BenchReport,
    BenchRow,
    EngineInfo,
    Settings,
)
from llmcli.commands.bench.report.results import Test as Counts
from llmcli.commands.bench.view.formats import CsvWriter
from llmcli.commands.bench.view.markdown import MarkdownWriter, TableColumns
from llmcli.commands.bench.view.table import render_beside
from llmcli.reports.ceilings import Ceilings, MatrixRate, ReadRate
from llmcli.reports.work import PartWork

BY = Bencher(build_commit="1a2b3c4d", build_number=321, cpu_info="A CPU", gpu_info="")
DEFAULT = Settings(
    model="m", device="auto", dtype="auto", n_batch=2048, n_ubatch=512, n_threads=8,
    type_k="auto", type_v="auto", n_gpu_layers=-1, flash_attn="auto", no_kv_offload=False,
    embeddings=False, use_mmap=True,
)  # fmt: skip
RAN = EngineInfo(
    engine="llmcli", version="0.1", model_type="llama 7B Q4_0", model_size=3_825_517_568,
    model_n_params=6_738_415_616, backend="CUDA", device="cuda:0", dtype="bfloat16",
    weight_format="bfloat16", product_format="bfloat16",
    type_k="bf16", n_gpu_layers=33, load_s=1.5, bits_per_weight=4.5,
)  # fmt: skip
PROMPT = BenchRow(
    number=1, settings=DEFAULT, test=Counts(n_prompt=512, n_gen=0, depth=0), engine="llmcli",
    test_time="2026-01-02T03:04:05Z", info=RAN, samples_ns=(200_000_000, 250_000_000),
    first_ns=(200_000_000, 250_000_000), peak_memory_bytes=5 << 30, roofline_ns=90_000_000.0,
    work=PartWork(flops=7_000_000_000_000, weights=10**9),
)  # fmt: skip
TEXT = replace(
    PROMPT, number=2, test=Counts(n_prompt=0, n_gen=4, depth=1024), first_ns=(),
    samples_ns=(100_000_000,), token_ns=(10_000_000, 20_000_000, 30_000_000, 40_000_000),
)  # fmt: skip
FAILED = replace(
    PROMPT, info=None, samples_ns=(), first_ns=(), work=None, roofline_ns=None,
    error=(5, "out_of_memory", "no room | for\nit"),
)  # fmt: skip


def markdown(*rows: BenchRow, settings: tuple[Settings, ...] = (DEFAULT,), **more: Any) -> str:
    where = {"gpu": True, "cpu": False} | more
    columns = TableColumns(settings=settings, default=DEFAULT, **where)
    writer = MarkdownWriter(by=BY, columns=columns)
    return writer.header() + "".join(map(writer.row, rows)) + writer.footer()


def test_on_a_gpu_it_is_what_llama_bench_prints() -> None:
    assert markdown(PROMPT, TEXT) == (
        "| model                          |       size |     params | backend    | ngl |"
        "            test |                  t/s |\n"
        "| ------------------------------ | ---------: | ---------: | ---------- | --: |"
        " --------------: | -------------------: |\n"
        "| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  -1 |"
        "           pp512 |     2304.00 ± 362.04 |\n"
        "| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  -1 |"
        "     tg4 @ d1024 |         40.00 ± 0.00 |\n"
        "\n"
        "build: 1a2b3c4d (321)\n"
    )


def columns(*settings: Settings, gpu: bool = False, engines: bool = False) -> list[str]:
    text = markdown(settings=settings, gpu=gpu, cpu=not gpu, engines=engines)
    return [cell.strip() for cell in text.splitlines()[0].split("|")[1:-1]][4:-2]


def test_columns_are_those_that_vary_or_were_asked_for() -> None:
    assert columns(DEFAULT) == ["threads"]
    assert columns(DEFAULT, gpu=True) == ["ngl"]
    assert columns(replace(DEFAULT, n_threads=2), gpu=True) == ["ngl", "threads"]
    assert columns(replace(DEFAULT, n_batch=64)) == ["threads", "n_batch"]
    assert columns(DEFAULT, replace(DEFAULT, type_k="f16"), engines=True) == [
        "threads", "type_k", "engine",
    ]  # fmt: skip
    everything = replace(
        DEFAULT, n_cpu_moe=1, cpu_mask="0x1", cpu_strict=True, poll=0, n_batch=1, n_ubatch=1,
        type_k="f16", type_v="f16", main_gpu=1, split_mode="row", no_kv_offload=True,
        flash_attn="on", device="cpu", tensor_split="1.00", tensor_buft_overrides="x=CPU",
        use_mmap=False, embeddings=True, no_op_offload=True, no_host=True, dtype="float32",
    )  # fmt: skip
    assert columns(everything) == [
        "n_cpu_moe", "threads", "cpu_mask", "cpu_strict", "poll", "n_batch", "n_ubatch",
        "type_k", "type_v", "main_gpu", "sm", "nkvo", "fa", "dev", "ts", "ot", "mmap", "embd",
        "nopo", "noh", "dtype",
    ]  # fmt: skip


def test_an_error_is_one_cell_of_one_row() -> None:
    row = markdown(FAILED, settings=(DEFAULT,)).splitlines()[2]
    assert row.count(" | ") == markdown(PROMPT).splitlines()[2].count(" | ")
    assert row.endswith("| error: no room \\| for\\nit |")
    assert row.startswith("| m   ")  # the model as it was named: none was loaded


def test_a_row_of_shapes_alone_has_no_rate() -> None:
    meta = replace(PROMPT, samples_ns=(), first_ns=(), meta=True)
    assert markdown(meta).splitlines()[2].endswith("|              not run |")


def test_sizes_below_a_gibibyte_and_a_billion() -> None:
    small = replace(PROMPT, info=replace(RAN, model_size=98_362_432, model_n_params=134_515_008))
    assert "|  93.81 MiB |   134.52 M |" in markdown(small)


def test_a_quote_in_a_value_is_doubled() -> None:
    odd = replace(PROMPT, settings=replace(DEFAULT, model='a "b",c'))
    assert ',"a ""b"",c",' in CsvWriter(BY).row(odd)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [((), 50, None), ((7,), 99, 7), ((1, 2, 3, 4), 50, 2.5), ((4, 1, 3, 2), 90, 3.7)],
)
def test_percentile(values: tuple[int, ...], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


CEILINGS = Ceilings(
    device="cuda:0", threads=8, reads=(ReadRate(nbytes=1 << 30, bytes_per_s=2e12, level="memory"),),
    matrices=(MatrixRate(dtype="bfloat16", flops_per_s=7e14),), caches=(), seconds=1.0,
)  # fmt: skip
RATIO = Against(
    test=TEXT.test, peer="transformers", ratios=(1.0, 2.0, 3.0), median=2.0, lowest=1.0,
    highest=3.0, quartiles=(1.5, 2.5), of_means=1.9, number=2, order=("llmcli", "transformers") * 3,
)  # fmt: skip
CPU = replace(RAN, backend="CPU", device="cpu", n_gpu_layers=0)


def shown(width: int, *rows: BenchRow, weights: str = "", **more: object) -> list[str]:
    report = BenchReport(rows=rows, **more)  # type: ignore[arg-type]
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(render_beside(report, ("A CPU", "8 cores", "1 thread"), weights=weights))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (120, "model size params backend ngl test t/s"),
        (100, "model size params backend ngl test t/s"), (90, "model size backend ngl test t/s"),
        (80, "model backend ngl test t/s"), (60, "model ngl test t/s"), (55, "model test t/s"),
        (40, "test t/s"), (20, "test t/s"),
    ],
)  # fmt: skip
def test_what_every_row_repeats_goes_where_there_is_no_room(room: int, kept: str) -> None:
    lines = markdown(PROMPT, TEXT, room=room).splitlines()
    assert lines[0].replace("|", " ").split() == kept.split()
    assert room < 40 or max(map(len, lines[:4])) <= room
    assert lines[3].endswith(" 40.00 ± 0.00 |")


def test_what_tells_rows_apart_stays() -> None:
    other = replace(DEFAULT, model="other", n_threads=DEFAULT.n_threads + 1)
    lines = markdown(PROMPT, settings=(DEFAULT, other), room=40).splitlines()
    assert lines[0].replace("|", " ").split() == ["model", "threads", "test", "t/s"]


def test_the_second_table() -> None:
    lines = shown(140, PROMPT, TEXT, FAILED, ceilings=(CEILINGS,), against=(RATIO,))
    heading = "test first token token p50 p90 p99 FLOPs peak GPU roofline"
    assert " ".join(lines[1].split()) == heading
    assert " ".join(lines[3].split()) == "pp512 225 ms 7 T 5 GiB 40 %"
    assert " ".join(lines[4].split()) == "tg4 @ d1024 25 ms 37 ms 39.7 ms 7 T 5 GiB 90 %"
    text = "\n".join(lines)
    assert "error" not in text  # the first table has it
    assert "ceilings: memory 2 TB/s, bfloat16 products 700 TFLOP/s" in text
    assert "load 1.50 s" in text
    assert lines[-1] == "A CPU · 8 cores · 1 thread"


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("./models/first", "./models/second"), ["first", "second"]),
        (("org/first-1B", "org/first-3B"), ["first-1B", "first-3B"]),
        (("./models/first", "tiny"), ["./models/first", "tiny"]),
        (("./a/m.gguf", "./ab/m.gguf"), ["a/m.gguf", "ab/m.gguf"]),
    ],
)
def test_names_of_models_are_shown_from_where_they_differ(
    names: tuple[str, ...], kept: list[str]
) -> None:
    rows = [replace(PROMPT, settings=replace(DEFAULT, model=name)) for name in names]
    assert [line.split()[0] for line in shown(140, *rows)[3:5]] == kept


def test_peaks_estimates_and_both_counts() -> None:
    work = PartWork(flops=7_000_000_000_000, flops_full=9_000_000_000_000, weights=10**9)
    row = replace(PROMPT, info=replace(CPU, base_bytes=3 << 28), work=work)
    lines = shown(140, row)
    assert " ".join(lines[1].split()) == "test first token FLOPs full square peak RSS roofline"
    assert " ".join(lines[3].split()) == "pp512 225 ms 7 T 9 T 5 GiB 40 %"
    alike = replace(work, flops_full=work.flops + 1)
    assert "full square" not in shown(140, replace(row, work=alike))[1]
    assert "base 768 MiB (RSS before the model) · load 1.50 s" in lines
    meta = replace(
        PROMPT, samples_ns=(), first_ns=(), peak_memory_bytes=None, meta=True, work=None,
        estimated_memory_bytes=3 << 30, info=replace(CPU, device="meta", load_s=None),
    )  # fmt: skip
    lines = shown(140, meta)
    assert " ".join(lines[1].split()) == "test needs lower bound"
    assert " ".join(lines[3].split()) == "pp512 3 GiB 90 ms"


def test_whose_weights_are_random() -> None:
    assert "random weights (seed 3) · load 1.50 s" in shown(
        99, PROMPT, weights="random weights (seed 3)"
    )
    assert "random" not in "\n".join(shown(99, PROMPT))


def test_ratios_have_a_verdict_and_that_of_the_means() -> None:
    other = replace(RAN, engine="transformers")
    theirs = replace(TEXT, number=3, engine="transformers", info=other)
    close = replace(RATIO, test=PROMPT.test, number=1)
    fast = replace(RATIO, ratios=(1.9, 2.0, 2.1))
    slow = replace(RATIO, median=0.5, ratios=(0.49, 0.5, 0.51))
    once = replace(RATIO, ratios=(2.0,))
    lines = shown(140, PROMPT, TEXT, theirs, against=(close, fast, slow, once))
    at = lines.index("llmcli ÷ transformers in tokens/s: the median of pairwise ratios")
    assert " ".join(lines[at + 1].split()) == "test median 95 % interval pairs of the means"
    assert [" ".join(line.split()) for line in lines[at + 3 : at + 7]] == [
        "pp512 2.00× 0.46× … 7.22× 3 1.90× undecided",
        "tg4 @ d1024 2.00× 1.76× … 2.26× 3 1.90× faster",
        "tg4 @ d1024 0.50× 0.48× … 0.53× 3 1.90× slower",
        "tg4 @ d1024 2.00× 1 1.90× undecided",
    ]
    shared = "both engines are in this process: neither has a peak memory of its own"
    assert shared in lines
    assert shared in shown(140, PROMPT, replace(FAILED, engine="transformers"))
    assert shared not in shown(140, PROMPT, TEXT)


def test_more_than_a_ceiling_is_a_ceiling_that_was_not_one() -> None:
    right = "faster than their ceiling"
    fast = replace(PROMPT, roofline_ns=1.2 * PROMPT.avg_ns)
    said = [line for line in shown(200, fast, TEXT) if right in line]
    assert said[0].startswith("faster than their ceiling: pp512; something else took the machine")
    near = replace(PROMPT, roofline_ns=1.09 * PROMPT.avg_ns)
    assert right not in "\n".join(shown(200, near))


def test_each_device_and_dtype_has_its_ceilings() -> None:
    other = replace(
        CEILINGS, device="cpu", threads=1, matrices=(MatrixRate(dtype="float32", flops_per_s=1e11),)
    )
    text = "\n".join(shown(140, PROMPT, ceilings=(CEILINGS, other)))
    assert "ceilings (cuda:0, 8 threads): memory 2 TB/s, bfloat16 products 700 TFLOP/s" in text
    assert "ceilings (cpu, 1 thread): memory 2 TB/s, float32 products 100 GFLOP/s" in text


def test_few_columns_keep_what_nobody_else_measures() -> None:
    lines = shown(44, PROMPT, TEXT)
    assert " ".join(lines[1].split()) == "test first token token p50"
    assert max(map(len, lines)) <= 44


def test_nothing_ran() -> None:
    assert shown(80, FAILED) == []


def test_configurations_are_told_apart() -> None:
    other = replace(PROMPT, settings=replace(DEFAULT, n_threads=2, model="other"))
    lines = shown(160, PROMPT, other)
    assert lines[1].split()[:3] == ["model", "threads", "test"]
    assert lines[4].split()[:3] == ["other", "2", "pp512"]


def test_whatever_varies_tells_them_apart() -> None:
    varied = replace(
        DEFAULT, device="cpu", type_k="f32", type_v="f32", no_kv_offload=True, use_mmap=False,
        embeddings=True, poll=0, split_mode="row",
    )  # fmt: skip
    lines = shown(300, PROMPT, replace(PROMPT, number=2, settings=varied))
    assert lines[1].split()[:9] == [
        "dev", "type_k", "type_v", "nkvo", "embd", "mmap", "poll", "sm", "test",
    ]  # fmt: skip
    assert lines[4].split()[:9] == ["none", "f32", "f32", "1", "1", "0", "0", "row", "pp512"]
    pair = replace(RATIO, number=1)
    lines = shown(300, PROMPT, replace(PROMPT, number=2, settings=varied),
                  against=(pair, replace(pair, number=2)))  # fmt: skip
    at = next(place for place, line in enumerate(lines) if "÷" in line)
    assert [line.split()[0] for line in lines[at + 1 : at + 5] if "─" not in line] == [
        "dev", "auto", "none",
    ]  # fmt: skip
