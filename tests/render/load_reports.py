"""How a model was loaded, with known numbers, for the tests of what fits."""

from dataclasses import replace

from llmcli.commands.load.report import (
    LedgerLine,
    LoadBytes,
    LoadMemory,
    LoadReport,
    Numbers,
    Shared,
    Stage,
)

NUMBERS = Numbers(
    count=2000, mean=0.25, std=1.0, min=-2.0, max=3.0, zeros=1, nan=0, inf=0, negative_inf=0,
    first_bad=None,
)  # fmt: skip
LINES = (
    LedgerLine(
        parameter="blocks.{0-29}.attn.W_q", source="blk.{0-29}.attn_q.weight", stored="Q4_1",
        shape=(576, 576), bytes=6 << 20, operations=("unpaired rows of 9 heads",),
        dequantized=True, numbers=NUMBERS, tensors=30,
    ),
    LedgerLine(
        parameter="ln_final.w", source="output_norm.weight", stored="F32", shape=(576,),
        bytes=2304, numbers=replace(NUMBERS, zeros=0),
    ),
    LedgerLine(
        source="rope.inv_freq", stored="F32", shape=(32,), bytes=128,
        reason="frequencies, which are computed",
    ),
)  # fmt: skip
REPORT = LoadReport(
    dtype="bfloat16", files=2, bytes=LoadBytes(files=5 << 20, tensors=4 << 20, weights=8 << 20),
    memory=LoadMemory(before=100 << 20, peak=300 << 20, device=None), ledger=LINES, rows=LINES,
    stages=(
        Stage(name="find", seconds=0.25), Stage(name="read", seconds=0.5, bytes=1_000_000_000),
        Stage(name="convert", seconds=0.25, bytes=10**9),
    ),
    shared=(Shared(kind="tied", names=("head.W", "embed.W"), bytes=1 << 20),),
    claims=(), checks=(), notes=(), numbers=4000, fault=None, not_finite=None,
)  # fmt: skip
