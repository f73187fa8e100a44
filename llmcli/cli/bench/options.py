"""The options of llama-bench, by its names, and ours, which are long ones only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from llmcli.cli.options import MODEL, OUTPUT, OutputOptions
from llmcli.cli.params import Range

TESTS, SWEPT, RUNS, OURS = "Tests", "Swept (lists as for tests)", "Runs", "Beyond llama-bench"
UNUSED = "Accepted without effect"

Format = Literal["csv", "json", "jsonl", "md", "sql", "none"]
Texts = list[str] | None


def _option(panel: str, *names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=help)


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """What is measured, on which models."""

    model: Annotated[
        Texts,
        _option(
            MODEL,
            "-m",
            "--model",
            metavar="MODEL",
            help="A catalog name (smollm2, tiny), a "
            "path, or org/name[@rev] on the hub. [default: $LLMCLI_MODEL, else smollm2]",
        ),
    ] = None
    hf_repo: Annotated[
        Texts,
        _option(MODEL, "-hf", "-hfr", "--hf-repo", metavar="ORG/NAME", help="A model on the hub."),
    ] = None
    hf_file: Annotated[
        Texts, _option(MODEL, "-hff", "--hf-file", metavar="FILE", help="One file of --hf-repo.")
    ] = None
    hf_token: Annotated[
        str | None,
        _option(
            MODEL, "-hft", "--hf-token", metavar="TOKEN", help="For the hub, instead of $HF_TOKEN."
        ),
    ] = None
    n_prompt: Annotated[
        Texts,
        _option(
            TESTS,
            "-p",
            "--n-prompt",
            metavar="N",
            help="Prompts of so many tokens, 0 for "
            "none; a list (16,32) or a range (1-4, 1-9+2, 1-8*2). [default: 512]",
        ),
    ] = None
    n_gen: Annotated[
        Texts,
        _option(
            TESTS, "-n", "--n-gen", metavar="N", help="Texts of so many new tokens. [default: 128]"
        ),
    ] = None
    n_pg: Annotated[
        Texts,
        _option(
            TESTS,
            "-pg",
            metavar="PP,TG",
            help="A prompt and new tokens after it, in one run; may be repeated.",
        ),
    ] = None
    n_depth: Annotated[
        Texts,
        _option(
            TESTS,
            "-d",
            "--n-depth",
            metavar="N",
            help="Tokens that are in the cache before the clock starts. [default: 0]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweptOptions:
    """What may take several values: every combination is a configuration."""

    batch_size: Annotated[
        Texts,
        _option(
            SWEPT,
            "-b",
            "--batch-size",
            metavar="N",
            help="Tokens of a prompt handed over at once. [default: 2048]",
        ),
    ] = None
    ubatch_size: Annotated[
        Texts,
        _option(
            SWEPT,
            "-ub",
            "--ubatch-size",
            metavar="N",
            help="Tokens of a prompt computed at once. [default: 512]",
        ),
    ] = None
    threads: Annotated[
        Texts,
        _option(
            MODEL,
            "-t",
            "--threads",
            metavar="N",
            help="CPU threads. [default: OMP_NUM_THREADS, else one per core]",
        ),
    ] = None
    dtype: Annotated[
        Texts,
        _option(
            MODEL,
            "--dtype",
            metavar="DTYPE",
            help="Arithmetic: auto, float64, float32, bfloat16 or float16. [default: auto]",
        ),
    ] = None
    device: Annotated[
        Texts,
        _option(
            MODEL,
            "-dev",
            "--device",
            metavar="DEVICE",
            help="auto, cpu (or none), cuda:0 (or "
            "CUDA0), mps, or meta: no weights, memory and FLOPs only. [default: auto]",
        ),
    ] = None
    cache_type_k: Annotated[
        Texts,
        _option(
            SWEPT,
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            help="Keys in the cache: f32, f16, bf16 … [default: that of the arithmetic]",
        ),
    ] = None
    cache_type_v: Annotated[
        Texts,
        _option(SWEPT, "-ctv", "--cache-type-v", metavar="TYPE", help="Values in the cache."),
    ] = None
    n_gpu_layers: Annotated[
        Texts,
        _option(
            SWEPT,
            "-ngl",
            "--n-gpu-layers",
            metavar="N",
            help="Layers on the GPU; -1 for all. [default: -1]",
        ),
    ] = None
    no_kv_offload: Annotated[
        Texts,
        _option(
            SWEPT,
            "-nkvo",
            "--no-kv-offload",
            metavar="0|1",
            help="Keep the cache off the GPU. [default: 0]",
        ),
    ] = None
    flash_attn: Annotated[
        Texts,
        _option(
            SWEPT,
            "-fa",
            "--flash-attn",
            metavar="on|off|auto",
            help="Fused attention. [default: auto]",
        ),
    ] = None
    embeddings: Annotated[
        Texts,
        _option(
            SWEPT,
            "-embd",
            "--embeddings",
            metavar="0|1",
            help="Embeddings instead of logits. [default: 0]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UnusedOptions:
    """llama-bench's options that change nothing here; those in its fields are kept for them."""

    cpu_mask: Annotated[
        Texts, _option(UNUSED, "-C", "--cpu-mask", metavar="HEX", help="Cores. [default: 0x0]")
    ] = None
    cpu_strict: Annotated[
        Texts, _option(UNUSED, "--cpu-strict", metavar="0|1", help="Strict placement.")
    ] = None
    poll: Annotated[
        Texts, _option(UNUSED, "--poll", metavar="0...100", help="Polling. [default: 50]")
    ] = None
    n_cpu_moe: Annotated[
        Texts, _option(UNUSED, "-ncmoe", "--n-cpu-moe", metavar="N", help="Experts on the CPU.")
    ] = None
    split_mode: Annotated[
        Texts,
        _option(UNUSED, "-sm", "--split-mode", metavar="none|layer|row", help="Several GPUs."),
    ] = None
    main_gpu: Annotated[
        Texts, _option(UNUSED, "-mg", "--main-gpu", metavar="I", help="The first GPU.")
    ] = None
    tensor_split: Annotated[
        Texts, _option(UNUSED, "-ts", "--tensor-split", metavar="A/B", help="Share of each GPU.")
    ] = None
    override_tensor: Annotated[
        Texts,
        _option(
            UNUSED, "-ot", "--override-tensor", metavar="NAME=TYPE;…", help="Places of tensors."
        ),
    ] = None
    mmap: Annotated[
        Texts, _option(UNUSED, "-mmp", "--mmap", metavar="0|1", help="Memory mapping.")
    ] = None
    load_mode: Annotated[
        Texts, _option(UNUSED, "-lm", "--load-mode", metavar="MODE", help="How files are read.")
    ] = None
    direct_io: Annotated[
        Texts, _option(UNUSED, "-dio", "--direct-io", metavar="0|1", help="Reading past caches.")
    ] = None
    no_op_offload: Annotated[
        Texts, _option(UNUSED, "-nopo", "--no-op-offload", metavar="0|1", help="Host operations.")
    ] = None
    no_host: Annotated[
        Texts, _option(UNUSED, "--no-host", metavar="0|1", help="No host buffers.")
    ] = None
    fit_target: Annotated[
        Texts, _option(UNUSED, "-fitt", "--fit-target", metavar="MIB", help="Margin on the GPU.")
    ] = None
    fit_ctx: Annotated[
        Texts, _option(UNUSED, "-fitc", "--fit-ctx", metavar="N", help="Least context with it.")
    ] = None
    rpc: Annotated[
        str | None, _option(UNUSED, "-rpc", "--rpc", metavar="SERVERS", help="Remote devices.")
    ] = None
    numa: Annotated[str | None, _option(UNUSED, "--numa", metavar="MODE", help="Memory nodes.")] = (
        None
    )
    prio: Annotated[
        str | None, _option(UNUSED, "--prio", metavar="-1|0|1|2|3", help="Priority.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is measured and shown."""

    repetitions: Annotated[
        int,
        _option(RUNS, "-r", "--repetitions", metavar="N", help="Runs of each test."),
        Range(1, 1_000_000),
    ] = 5
    delay: Annotated[
        float,
        _option(RUNS, "--delay", metavar="SECONDS", help="Pause before each test. [default: 0]"),
        Range(0, 86_400),
    ] = 0.0
    no_warmup: Annotated[
        bool, _option(RUNS, "--no-warmup", help="No runs before those that count.")
    ] = False
    output: Annotated[
        Format | None,
        _option(
            RUNS,
            "-o",
            "--output",
            metavar="FORMAT",
            help="Format on stdout: csv, json, jsonl, md, sql or none. [default: md]",
        ),
    ] = None
    output_err: Annotated[
        Format,
        _option(
            RUNS,
            "-oe",
            "--output-err",
            metavar="FORMAT",
            help="Format on stderr, too. [default: none]",
        ),
    ] = "none"
    progress: Annotated[
        bool, _option(RUNS, "--progress", help="A line on stderr for every run.")
    ] = False
    verbose: Annotated[
        bool, _option(RUNS, "-v", "--verbose", help="Machine, ceilings and loads on stderr.")
    ] = False
    list_devices: Annotated[
        bool, _option(RUNS, "--list-devices", help="List the devices, and nothing else.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OurOptions:
    """What llama-bench has not."""

    against: Annotated[
        Literal["transformers", "llama.cpp"] | None,
        _option(
            OURS,
            "--against",
            metavar="ENGINE",
            help="Measure transformers or llama.cpp on "
            "the same weights, too, the runs of both in turns.",
        ),
    ] = None
    random_weights: Annotated[
        bool,
        _option(
            OURS,
            "--random-weights",
            help="The model from its configuration alone, its weights drawn with --seed.",
        ),
    ] = False
    seed: Annotated[
        int,
        _option(OURS, "--seed", metavar="N", help="Seed of the random tokens. [default: 0]"),
        Range(0, 2**63 - 1),
    ] = 0
    no_ceilings: Annotated[
        bool,
        _option(
            OURS,
            "--no-ceilings",
            help="Do not measure what the machine can do at most, "
            "which takes a second; the share of the roofline is left out.",
        ),
    ] = False
    offline: Annotated[
        bool, _option(OURS, "--offline", help="Use only what is on this machine.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class BenchOutput(OutputOptions):
    """As everywhere, without `-q`: short options are llama-bench's."""

    quiet: Annotated[bool, _option(OUTPUT, "--quiet", help="No progress, notes or warnings.")] = (
        False
    )
