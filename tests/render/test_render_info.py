"""`info` of devices that are not here, as text at fixed widths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import changes, lines_of, shown
from rich.cells import cell_len

from llmcli.commands.info import report as facts
from llmcli.commands.info.view import render_info
from llmcli.records import info
from llmcli.records.checks import ViewCheck
from llmcli.records.text import Token
from llmcli.records.work import PartWork

NEED = info.MemoryNeed(
    formats=dict.fromkeys(info.NO_FORMATS, "bfloat16"), batch=2, context=8192, weights=3 << 30,
    cache=1 << 30, cache_per_token=1 << 17, copies=1 << 30, activations=50 << 20, runtime=56 << 20,
)  # fmt: skip
TOKEN = PartWork(flops=9, flops_full=9, weights=3 << 30, cache=1 << 29, activations=8 << 20)
CPU = info.Device(
    device="cpu", name="Some CPU", total_bytes=16 << 30, free_bytes=4 << 30, bfloat16=True
)
FULL = info.LayerType(
    kind="full attention", layers=(0, 2, 3), window=None, heads=9, kv_heads=3, head_dim=64,
    value_dim=64, rotary=True, qk_norm=False, norm="RMSNorm", hidden=1536, activation="silu",
    gated=True,
)  # fmt: skip
WINDOW = replace(FULL, kind="sliding window", window=4096, layers=(1,), kv_heads=1, qk_norm=True)
MODEL = facts.Architecture(
    family="llama", model_type="llama", width=576, vocabulary=49152, context=8192, positions=None,
    tied=True,
    parameters=info.ParameterCounts(
        total=134515008, active=134515008, embedding=28311552, attention=26542080, mixers=0,
        mlp=79626240, norms=35136, head=0,
    ),
    layers=(FULL, WINDOW),
)  # fmt: skip
FILE = facts.FileFacts(
    kind="gguf", path="/models/x.gguf", files=1, bytes=98362432, tensors=271,
    formats=(facts.StoredFormat(format="Q4_1", tensors=271, numbers=320, bytes=200),),
    entries={"general.name": "x"},
)  # fmt: skip
REPORT = facts.InfoReport(
    name="smollm2", file=FILE, architecture=MODEL,
    flops=facts.FlopsNeed(
        context=8192, first=269_000_000, last=835_000_000, prompt=4_080_000_000_000,
        prompt_full=6_400_000_000_000_000,
    ),
    fits=(info.DeviceFit(device=CPU, need=NEED, token=TOKEN, fits=False, longest=100),),
    tokenizer=facts.TokenizerFacts(
        kind="BPE", vocabulary=49152, bos=Token(id=1, text="<|im_start|>"),
        adds_bos=False, eos=(Token(id=2, text="<|im_end|>"),), chat_template=True,
    ),
    checks=(ViewCheck(name="n", words="it holds", value=0.0, tolerance=0.0),),
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_every_line_fits_and_every_device_is_there(width, gpus):
    fits = [
        info.DeviceFit(
            device=replace(CPU, device=f"cuda:{i}", name="NVIDIA H200"), need=NEED, token=TOKEN,
            fits=True, longest=131072,
        )
        for i in range(gpus)
    ]  # fmt: skip
    report = replace(REPORT, fits=(*fits, *REPORT.fits))
    brief = lines_of(render_info(report, metadata=True), width=width)
    assert max(map(cell_len, brief)) <= width
    assert all(any(line.startswith(f"cuda:{i} ") for line in brief) for i in range(gpus))
    assert sum("fits: 5.05 GiB of 4" in line for line in brief) == gpus
    lines = lines_of(render_info(report, full=True), width=width)
    assert max(map(cell_len, lines)) <= width
    heads = " ".join(line for line in lines if line.startswith(" " * 9))
    assert all(f"cuda:{i}" in heads for i in range(gpus))
    words = " ".join(line for line in lines if line.startswith("fits")).split()
    assert words.count("yes") == gpus
    assert words.count("no") == 1


def on(device=CPU, need=NEED, fits=None, longest=None):
    fit = info.DeviceFit(device=device, need=need, token=TOKEN, fits=fits, longest=longest)
    return replace(REPORT, fits=(fit,))


def test_screens(golden):
    """Of machines that no transcript has; the others are in transcripts/info-facts.txt."""
    def new(report, **how):
        return changes(shown(render_info(REPORT), **how), shown(render_info(report), **how))

    unknown, unusable = on(replace(CPU, free_bytes=None)), on(replace(CPU, usable=False))
    both = replace(REPORT, fits=(*unknown.fits, *unusable.fits))
    packed = replace(NEED, formats=NEED.formats | {"product_format": "int16"}, weights=5 << 30)
    golden("info", {
        "without a size of the memory": new(unknown, width=200),
        "without a CUDA in PyTorch": new(unusable, width=200),
        "side by side, in full": shown(render_info(both, full=True)).partition("\n\n")[2],
        "blocks that do not fit stay in the file": new(on(need=packed, fits=False, longest=0)),
        "those that do fit, do not": new(
            on(need=replace(packed, weights=3 << 30), fits=False, longest=0)
        ),
    })  # fmt: skip
