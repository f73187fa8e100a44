"""Both tables of what no transcript has: a GPU, ratios, a busy machine, names of models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drawn import changes, shown

from llmcli.commands.bench.report.comparison import Against
from llmcli.commands.bench.report.plan import OurOptions, Plan, RunOptions
from llmcli.commands.bench.report.row import BenchReport, BuildInfo, Row
from llmcli.commands.bench.report.settings import Settings
from llmcli.commands.bench.view.rows import CSV, markdown, render_beside
from llmcli.errors import OutOfMemory
from llmcli.records.engines import EngineInfo, SpeedTest, TimedRun
from llmcli.records.machine import Ceilings, MatrixRate, ReadRate
from llmcli.records.work import Cost

BY = BuildInfo(build_commit="1a2b3c4d", build_number=321, cpu_info="A CPU", gpu_info="")
DEFAULT = Settings(model="m", n_threads=8)
PLAN = Plan(
    configurations=(DEFAULT,), default=DEFAULT, tests=(), runs=RunOptions(), ours=OurOptions()
)  # fmt: skip
RAN = EngineInfo(
    engine="llmcli", engine_version="0.1", model_type="llama 7B Q4_0", model_size=3_825_517_568,
    model_n_params=6_738_415_616, backends="CUDA", device="cuda:0", dtype="bfloat16",
    weight_format="bfloat16", product_format="bfloat16", type_k="bf16", gpu_layers=33,
    load_s=1.5,
)  # fmt: skip
WORK = Cost(flops=7_000_000_000_000, weights=10**9)
PP, TG = SpeedTest(n_prompt=512, n_gen=0), SpeedTest(n_prompt=0, n_gen=4, n_depth=1024)
TOKENS = TimedRun(total=100_000_000, tokens=(10_000_000, 20_000_000, 30_000_000, 40_000_000))
PROMPTS = [TimedRun(total=ns, first=ns) for ns in (200_000_000, 250_000_000)]


def row(
    number: int = 1, test: SpeedTest = PP, settings: Settings = DEFAULT, info: EngineInfo = RAN,
    **more: Any,
) -> Row:  # fmt: skip
    """Two runs of a prompt, or one of a text, on a GPU."""
    runs = PROMPTS if test.n_prompt else [TOKENS]
    known = {"runs": runs, "peak_memory_bytes": 5 << 30, "work": WORK, "roofline_ns": 9e7}
    return Row.of(number, settings, test, info, BY, "2026-11-22T10:00:00Z", **(known | more))


PROMPT, TEXT = row(), row(2, TG)
NOTHING: dict[str, Any] = {"runs": (), "work": None, "roofline_ns": None}
UNKNOWN = EngineInfo(
    engine="llmcli", model_type="m", backends="CPU", device="auto", dtype="auto", type_k="auto"
)
FAILED = row(info=UNKNOWN, error=OutOfMemory("no room | for\nit"), **NOTHING)


def table(*rows: Row, room: int | None = None) -> str:
    found = markdown(PLAN, BY, {"cuda"}, room)
    return found.head + "".join(map(found.row, rows)) + found.foot(len(rows))


CEILINGS = Ceilings(
    device="cuda:0", dtype="bfloat16", threads=8, caches=(), seconds=1.0,
    reads=(ReadRate(nbytes=1 << 30, bytes_per_s=2e12, level="memory"),),
    matrices=(MatrixRate(dtype="bfloat16", flops_per_s=7e14),),
)  # fmt: skip
RATIO = Against(
    test=TEXT.test.name, peer="transformers", ratios=(1.0, 2.0, 3.0), median=2.0, lowest=1.0,
    highest=3.0, quartiles=(1.5, 2.5), of_means=1.9, number=2, order=("llmcli", "transformers") * 3,
)  # fmt: skip
CPU = replace(RAN, backends="CPU", device="cpu", gpu_layers=0)


def beside(width: int, *rows: Row, markdown: bool = False, **more: object) -> str:
    report = BenchReport(rows=rows, **more)  # type: ignore[arg-type]
    machine = ("A CPU", "8 cores", "1 thread")
    return shown(render_beside(report, machine, markdown=markdown), width=width)


def named(*names: str) -> str:
    rows = [row(settings=replace(DEFAULT, model=name)) for name in names]
    return "\n".join(beside(140, *rows).split("\n")[3:5])


def test_screens(golden: Any) -> None:
    """The first table is llama-bench's; the second stands beside it."""
    work = Cost(flops=7_000_000_000_000, flops_full=9_000_000_000_000, weights=10**9)
    base = replace(CPU, base_bytes=3 << 28)
    square = row(info=base, work=work)
    theirs = row(3, TG, info=replace(RAN, engine="transformers"))
    ratios = (
        replace(RATIO, test=PROMPT.test.name, number=1), replace(RATIO, ratios=(1.9, 2.0, 2.1)),
        replace(RATIO, median=0.5, ratios=(0.49, 0.5, 0.51)), replace(RATIO, ratios=(2.0,)),
    )  # fmt: skip
    matrices = (MatrixRate(dtype="float32", flops_per_s=1e11),)
    other = replace(CEILINGS, device="cpu", dtype="float32", threads=1, matrices=matrices)
    varied = replace(
        DEFAULT, device="cpu", type_k="f32", type_v="f32", no_kv_offload=True, embeddings=True
    )
    both = (PROMPT, row(2, settings=varied))
    plain = beside(200, PROMPT, TEXT)
    barred = PROMPT, row(2, TG, settings=replace(DEFAULT, model="m|n"))
    absent = replace(UNKNOWN, engine="transformers")
    golden("bench", {
        "on a GPU it is what llama-bench prints": table(PROMPT, TEXT),
        "an error is one cell, of the model as it was named": table(FAILED),
        "the second table; an error is in the first alone":
            beside(140, PROMPT, TEXT, FAILED, ceilings=(CEILINGS,), against=(RATIO,)),
        "both counts, and the memory before": beside(140, square),
        "counts that are nearly alike are one":
            beside(140, row(info=base, work=replace(work, flops_full=work.flops + 1))),
        "loads of one model are told apart by its products": beside(
            200, *(row(info=replace(CPU, product_format=one)) for one in ("int8", "int16"))
        ),
        "ratios have a verdict and that of the means":
            beside(140, PROMPT, TEXT, theirs, against=ratios),
        "an engine that failed shared the process, too": changes(
            beside(200, PROMPT),
            beside(200, PROMPT, row(info=absent, error=OutOfMemory("no room"), **NOTHING)),
        ),
        "more than a ceiling is a ceiling that was none":
            changes(plain, beside(200, row(roofline_ns=1.2 * PROMPT.avg_ns), TEXT)),
        "a little more is not": changes(
            plain, beside(200, row(roofline_ns=1.09 * PROMPT.avg_ns), TEXT)
        ),
        "each device and dtype has its ceilings":
            changes(beside(200, PROMPT), beside(200, PROMPT, ceilings=(CEILINGS, other))),
        "in Markdown tables stand alone, as narrow as possible, and a bar in a name is escaped": [
            beside(width, *barred, ceilings=(CEILINGS, CEILINGS), against=(RATIO,), markdown=True)
            for width in (140, 72)
        ],
        "names of models are shown from where they differ": [
            named("./models/first", "./models/second"), named("org/first-1B", "org/first-3B"),
            named("./models/first", "tiny"), named("./a/m.gguf", "./ab/m.gguf"),
        ],
        "by whatever varies, in ratios, too": beside(
            300, *both, against=(replace(RATIO, number=1), replace(RATIO, number=2))
        ),
    })  # fmt: skip
    heads = [markdown(PLAN, BY, kinds).head for kinds in ({"mps"}, {"cuda", "cpu"}, {"cpu"})]
    columns = [("ngl" in head, "threads" in head) for head in heads]
    assert columns == [(True, False), (True, True), (False, True)]
    for room in (120, 100, 90, 80, 60, 55, 40):
        assert max(map(len, table(PROMPT, TEXT, room=room).splitlines()[:4])) <= room
    assert beside(80, FAILED) == "", "nothing ran"
    assert "<1 %" in beside(80, row(roofline_ns=1e6)), "near no ceiling, which is not 0"
    assert max(map(len, beside(44, PROMPT, TEXT).split("\n"))) <= 44
    assert ',"a ""b"",c",' in CSV.row(row(settings=replace(DEFAULT, model='a "b",c')))
