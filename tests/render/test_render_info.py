"""`info` as text at fixed widths, and what a file may have written into its names."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.info.report import (
    About,
    FamilyFacts,
    FileFacts,
    FlopsNeed,
    InfoReport,
    ModelFacts,
    StoredFormat,
    TokenizerFacts,
)
from llmcli.commands.info.view import render_families, render_info
from llmcli.reports.checks import ViewCheck
from llmcli.reports.info import (
    NO_FORMATS,
    Device,
    DeviceFit,
    LayerType,
    MemoryNeed,
    ParameterCounts,
)
from llmcli.reports.work import PartWork

NEED = MemoryNeed(
    formats=dict.fromkeys(NO_FORMATS, "bfloat16"), batch=2, context=8192, weights=3 << 30,
    cache=1 << 30, cache_per_token=1 << 17, copies=1 << 30, activations=50 << 20, runtime=56 << 20,
)  # fmt: skip
TOKEN = PartWork(flops=9, flops_full=9, weights=3 << 30, cache=1 << 29, activations=8 << 20)
CPU = Device(device="cpu", name="Some CPU", total_bytes=16 << 30, free_bytes=4 << 30, bfloat16=True)
FULL = LayerType(
    kind="full attention", layers=(0, 2, 3), window=None, heads=9, kv_heads=3, head_dim=64,
    value_dim=64, rotary=True, qk_norm=False, norm="RMSNorm", hidden=1536, activation="silu",
    gated=True,
)  # fmt: skip
WINDOW = replace(FULL, kind="sliding window", window=4096, layers=(1,), kv_heads=1, qk_norm=True)
MODEL = ModelFacts(
    family="llama", model_type="llama", width=576, vocabulary=49152, context=8192, positions=None,
    tied=True,
    counts=ParameterCounts(
        total=134515008, active=134515008, embedding=28311552, attention=26542080, mixers=0,
        mlp=79626240, norms=35136, head=0,
    ),
    layers=(FULL, WINDOW),
    flops=FlopsNeed(
        context=8192, first=269_000_000, last=835_000_000, prompt=4_080_000_000_000,
        prompt_full=6_400_000_000_000_000,
    ),
    fits=(DeviceFit(device=CPU, need=NEED, token=TOKEN, fits=False, longest=100),),
)  # fmt: skip
FILE = FileFacts(
    kind="gguf", path="/models/x.gguf", files=1, bytes=98362432, tensors=271,
    formats=(StoredFormat(format="Q4_1", tensors=271, numbers=320, bytes=200),),
    metadata={"general.name": "x"},
)  # fmt: skip
REPORT = InfoReport(
    name="smollm2", file=FILE, model=MODEL,
    tokenizer=TokenizerFacts(
        kind="BPE", vocabulary=49152, bos=(1, "<|im_start|>"), adds_bos=False,
        eos=((2, "<|im_end|>"),), chat_template=True,
    ),
    checks=(ViewCheck(name="n", words="it holds", value=0.0, tolerance=0.0),),
)  # fmt: skip


def shown(renderable, width, *, colour=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour,
        color_system="standard" if colour else None, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    console.print(renderable, crop=False)
    return [line.rstrip() for line in console.file.getvalue().split("\n")]


def test_what_is_said_at_eighty_columns():
    assert shown(render_info(REPORT), 80) == [
        "smollm2",
        "does not fit on cpu: needs 5.05 GiB besides PyTorch, of 4 GiB free, for 2",
        "sequences of 8,192 tokens; 100 tokens fit",
        "no smaller weight format or context fits either",
        "",
        "family      llama · type llama · width 576 · vocabulary 49,152",
        "parameters  134,515,008 · embedding 28.3 M · attention 26.5 M · MLP 79.6 M",
        "            norms 35.1 k · head tied to the embedding",
        "layers      3 × full attention · 9 heads of 64 · 3 kv heads · rotary · RMSNorm",
        "            silu MLP of 1,536, gated · layers 0,2-3",
        "            1 × sliding window of 4,096 keys · 9 heads of 64 · 1 kv head",
        "            rotary · q and k normalized · RMSNorm · silu MLP of 1,536, gated",
        "            layer 1",
        "context     8,192 tokens",
        "tokenizer   BPE · 49,152 tokens · chat template",
        "stored      GGUF, 1 file · 93.8 MiB on disk · Q4_1 200 B",
        "path        /models/x.gguf",
        "cpu         weights 3 GiB (bfloat16) · cache 1 GiB (128 KiB a token)",
        "            prompt 50 MiB · copies 1 GiB · libraries 56 MiB · 100 tokens fit",
        "",
    ]


def test_all_of_it_at_eighty_columns():
    lines = shown(render_info(REPORT, full=True), 80)
    assert lines == [
        "smollm2",
        "does not fit on cpu: needs 5.05 GiB besides PyTorch, of 4 GiB free, for 2",
        "sequences of 8,192 tokens; 100 tokens fit",
        "no smaller weight format or context fits either",
        "",
        "family      llama · type llama · width 576 · vocabulary 49,152",
        "parameters  134,515,008 (135 M) · all active",
        "            embedding 28,311,552 · attention 26,542,080 · MLP 79,626,240",
        "            norms 35,136 · head tied to the embedding",
        "layers      3 × full attention · 9 heads of 64 · 3 kv heads · rotary · RMSNorm",
        "            silu MLP of 1,536, gated · layers 0,2-3",
        "            1 × sliding window of 4,096 keys · 9 heads of 64 · 1 kv head",
        "            rotary · q and k normalized · RMSNorm · silu MLP of 1,536, gated",
        "            layer 1",
        "FLOPs       269 M the first token · 835 M token 8,192 · 4.08 T a prompt of 8,192",
        "            6.4 P as the full square",
        "context     8,192 tokens",
        "tokenizer   BPE · 49,152 tokens · chat template",
        '            BOS 1 "<|im_start|>" (not put in front) · EOS 2 "<|im_end|>"',
        "stored      GGUF, 1 file · 93.8 MiB on disk · 271 tensors of 200 B",
        "            Q4_1 200 B · 320 numbers of 5 bits · 271 tensors",
        "            1 metadata key, shown by --metadata",
        "path        /models/x.gguf",
        "",
        "memory for 8,192 tokens, 2 sequences",
        "                 cpu",
        "──────────────────────────────────────────────────────────────────",
        "format      bfloat16   of the weights",
        "weights        3 GiB",
        "cache          1 GiB   keys and values of every token",
        "  a token    128 KiB",
        "copies         1 GiB   of the cache, when a sequence ends",
        "prompt        50 MiB   most tensors while it is read",
        "libraries     56 MiB   their buffers, and the tokenizer",
        "needed      5.05 GiB   at once, besides PyTorch",
        "free           4 GiB",
        "fits              no",
        "longest          100   tokens that fit",
        "decoding    3.51 GiB   read and written for the last token of each",
        "  weights      3 GiB   each once",
        "  cache      512 MiB   what the token sees",
        "  others       8 MiB   what its parts compute",
        "cpu: Some CPU, 16 GiB",
        "",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_every_line_fits_and_every_device_is_there(width, gpus):
    fits = [
        DeviceFit(
            device=replace(CPU, device=f"cuda:{i}", name="NVIDIA H200"), need=NEED, token=TOKEN,
            fits=True, longest=131072,
        )
        for i in range(gpus)
    ]  # fmt: skip
    report = replace(REPORT, model=replace(MODEL, fits=(*fits, *MODEL.fits)))
    brief = shown(render_info(report, metadata=True), width)
    assert max(map(cell_len, brief)) <= width
    assert all(any(line.startswith(f"cuda:{i} ") for line in brief) for i in range(gpus))
    assert sum("fits: 5.05 GiB of 4" in line for line in brief) == gpus
    lines = shown(render_info(report, full=True), width)
    assert max(map(cell_len, lines)) <= width
    heads = " ".join(line for line in lines if line.startswith(" " * 9))
    assert all(f"cuda:{i}" in heads for i in range(gpus))
    words = " ".join(line for line in lines if line.startswith("fits")).split()
    assert words.count("yes") == gpus
    assert words.count("no") == 1


def test_what_is_not_known_is_said():
    fits = tuple(
        DeviceFit(device=device, need=NEED, token=TOKEN, fits=None, longest=None)
        for device in (replace(CPU, free_bytes=None), replace(CPU, usable=False))
    )
    both = replace(REPORT, model=replace(MODEL, fits=fits))
    text = "\n".join(shown(render_info(both, full=True), 80))
    assert "fits         unknown    no CUDA" in text
    assert "no CUDA: not in the PyTorch that is installed" in text
    verdicts = [
        " ".join(shown(render_info(replace(REPORT, model=replace(MODEL, fits=(fit,)))), 200)[1:2])
        for fit in fits
    ]
    need = "5.05 GiB needed for 2 sequences of 8,192 tokens; the"
    assert verdicts == [
        f"{need} free memory of cpu is unknown", f"{need} installed PyTorch has no CUDA",
    ]  # fmt: skip
    alone = replace(REPORT, model=None, tokenizer=None, unknown=("no config.json",), checks=())
    lines = shown(render_info(alone), 80)
    assert "unknown  no config.json" in lines
    assert not any("memory" in line or "✓" in line for line in lines)


def test_blocks_that_do_not_fit_are_said_to_stay_in_the_file():
    packed = replace(NEED, formats=NEED.formats | {"product_format": "int16"}, weights=5 << 30)
    for need, said in ((packed, True), (replace(packed, weights=3 << 30), False), (NEED, False)):
        fit = DeviceFit(device=CPU, need=need, token=TOKEN, fits=False, longest=0)
        text = " ".join(shown(render_info(replace(REPORT, model=replace(MODEL, fits=(fit,)))), 100))
        assert ("blocks stay in the mapped file" in text) == said


def test_metadata_without_effect_is_shown():
    ignored = {"llama.attention.sliding_window": "4096"}
    text = " ".join(shown(render_info(replace(REPORT, ignored=ignored)), 200))
    assert "llama.attention.sliding_window = 4096 · llama.cpp does not read it here either" in text


def test_who_the_model_is():
    about = About(
        summary="SmolLM2, 98 MB", name="Smol", organization="HF", license="mit", languages=("en",)
    )
    lines = shown(render_info(replace(REPORT, about=about)), 80)
    assert lines[1] == "SmolLM2, 98 MB"
    lines = shown(render_info(replace(REPORT, about=about), full=True), 80)
    assert lines[1:3] == ["SmolLM2, 98 MB", "Smol · by HF · license mit · language en"]
    lines = shown(render_info(replace(REPORT, about=About(kind="A", languages=("en", "de")))), 80)
    assert lines[1] == "A · languages en, de"
    assert lines[2].startswith("does not fit")


def test_a_configuration_alone_says_its_dtype():
    file = replace(FILE, files=0, tensors=0, formats=())
    model = replace(MODEL, declared=("bfloat16", 3 << 20))
    lines = shown(render_info(replace(REPORT, file=file, model=model)), 80)
    at = lines.index("stored      a configuration without weights")
    assert lines[at + 1] == "            says bfloat16, in which the weights have 3 MiB"


def test_nothing_that_a_file_says_reaches_the_terminal_raw():
    evil = "\x1b[2J[red]x\x07\n\u202e"
    report = replace(
        REPORT, name=evil, unknown=(evil,),
        file=replace(FILE, path=evil, metadata={evil: evil, "list": [evil] * 9, "raw": "\udcff"}),
        tokenizer=replace(REPORT.tokenizer, kind=evil, bos=(1, evil), eos=((2, evil),)),
    )  # fmt: skip
    text = "\n".join(shown(render_info(report, full=True, metadata=True), 100))
    assert not set("\x1b\x07\udcff") & set(text)
    assert "[red]x" in text
    assert "(9 entries)" in text.replace("\n", " ")


def test_metadata_is_cut_where_it_is_long():
    values = {"text": "a" * 5000, "flag": True, "number": 0.25, "list": list(range(40)), "none": []}
    lines = shown(
        render_info(replace(REPORT, file=replace(FILE, metadata=values)), metadata=True), 300
    )
    start = lines.index("metadata") + 1
    assert lines[start : start + 5] == [
        f'text = "{"a" * 200}" … (5,000 characters)',
        "flag = true",
        "number = 0.25",
        "list = [0, 1, 2, 3, 4, 5, … (40 entries)]",
        "none = []",
    ]


def test_yes_is_green_and_no_is_red():
    full = shown(render_info(REPORT, full=True), 80, colour=True)
    assert sum("\x1b[31m" in line for line in full) >= 2, "in the sentence and in the table"
    assert "\x1b[31mdoes not fit" in shown(render_info(REPORT), 80, colour=True)[1]
    fits = tuple(replace(fit, fits=True) for fit in MODEL.fits)
    good = replace(REPORT, model=replace(MODEL, fits=fits))
    assert any("\x1b[32m" in line for line in shown(render_info(good, full=True), 80, colour=True))
    assert "\x1b[32mfits on cpu" in shown(render_info(good), 80, colour=True)[1]


def test_families_are_a_table_of_one_line_each():
    family = FamilyFacts(
        name="any", words="one two " * 10, hf_types=("a" * 40, "b"), gguf_architectures=("c",),
        mixers=("attention", "other"), feed_forwards=("MLP",), checked="parity",
    )
    other = replace(family, name="more", hf_types=("d",), checked="parity, `tiny` run")
    names = ["family", "model_type", "GGUF", "layers", "particulars"]
    for width, count in ((50, 3), (90, 4), (200, 5)):
        lines = shown(render_families([family, other]), width)
        assert max(map(len, lines)) <= width
        assert lines[0].split() == names[:count]
        assert [line.split()[0] for line in lines[2:4]] == ["any", "more"]
        left = " and ".join(names[count:])
        assert lines[4:] == [
            *([f"{left}: --json"] if left else []), "", "checked: parity · more: `tiny` run", "",
        ]  # fmt: skip
    whole = f"any      {'a' * 40}, b   c      attention, other + MLP   {family.words}"
    assert lines[2] == whole.rstrip()


def test_the_ends_of_a_model_say_how_they_are_scaled_and_capped():
    gemma = replace(MODEL, tied=True, embedding_scale=2304**0.5, logit_cap=30.0, logit_scale=0.0625)
    said = " ".join(" ".join(shown(render_info(replace(REPORT, model=gemma)), 200)).split())
    assert "head tied to the embedding · embeddings × 48 · logits × 0.0625" in said
    assert "logits capped at 30" in said
    assert "logits" not in " ".join(shown(render_info(REPORT), 200))
