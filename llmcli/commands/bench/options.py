"""The options of `llmcli bench`: llama-bench's by its names, and ours, which are long ones only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmcli.shell.options import MODEL, OUTPUT, OutputOptions
from llmcli.shell.params import opt

TESTS, SWEPT, RUNS = "Tests", "Swept (lists as for tests)", "Runs"
OURS = "Beyond llama-bench"
# llama-bench's options that have no effect here; each takes one value, which is ignored
IGNORED = (
    "-C", "--cpu-mask", "--cpu-strict", "--poll", "-ncmoe", "--n-cpu-moe", "-sm", "--split-mode",
    "-mg", "--main-gpu", "-ts", "--tensor-split", "-ot", "--override-tensor", "-mmp", "--mmap",
    "-lm", "--load-mode", "-dio", "--direct-io", "-nopo", "--no-op-offload", "--no-host",
    "-fitt", "--fit-target", "-fitc", "--fit-ctx", "-rpc", "--rpc", "--numa", "--prio",
)  # fmt: skip

Texts = list[str] | None  # lists and ranges, given once or several times
Format = Literal["csv", "json", "jsonl", "md", "sql", "none"]


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """What is measured, on which models."""

    panel: ClassVar[str] = TESTS
    model: Texts = opt(
        None, "-m", "--model", "MODEL",
        "A catalog name (smollm2, tiny), a path, or org/name[@rev] on the hub. "
        "[default: $LLMCLI_MODEL, else smollm2]", panel=MODEL,
    )  # fmt: skip
    hf_repo: Texts = opt(
        None, "-hf", "-hfr", "--hf-repo", "ORG/NAME", "A model on the hub.", panel=MODEL,
    )  # fmt: skip
    hf_file: Texts = opt(
        None, "-hff", "--hf-file", "FILE", "One file of --hf-repo.", panel=MODEL,
    )  # fmt: skip
    hf_token: str | None = opt(
        None, "-hft", "--hf-token", "TOKEN", "For the hub, instead of $HF_TOKEN.", panel=MODEL,
    )  # fmt: skip
    n_prompt: Texts = opt(
        None, "-p", "--n-prompt", "N",
        "Prompts of so many tokens, 0 for none; a list (16,32) or a range (1-4, 1-9+2, 1-8*2). "
        "[default: 512]",
    )  # fmt: skip
    n_gen: Texts = opt(None, "-n", "--n-gen", "N", "Texts of so many new tokens. [default: 128]")
    n_pg: Texts = opt(
        None, "-pg", "PP,TG", "A prompt and new tokens after it, in one run; may be repeated."
    )
    n_depth: Texts = opt(
        None, "-d", "--n-depth", "N",
        "Tokens that are in the cache before the clock starts. [default: 0]",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweptOptions:
    """What may take several values: every combination is a configuration."""

    panel: ClassVar[str] = SWEPT
    batch_size: Texts = opt(
        None, "-b", "--batch-size", "N", "Tokens of a prompt handed over at once. [default: 2048]"
    )
    ubatch_size: Texts = opt(
        None, "-ub", "--ubatch-size", "N", "Tokens of a prompt computed at once. [default: 512]"
    )
    threads: Texts = opt(
        None, "-t", "--threads", "N",
        "CPU threads. [default: OMP_NUM_THREADS, else one per core]", panel=MODEL,
    )  # fmt: skip
    dtype: Texts = opt(
        None, "--dtype", "DTYPE",
        "Arithmetic: auto, float64, float32, bfloat16 or float16. [default: auto]", panel=MODEL,
    )  # fmt: skip
    activations: Texts = opt(
        None, "--activations", "BITS",
        "Bits of activations in products with packed weights: auto, 16 or 8. [default: auto, which "
        "is 16; beside llama.cpp, whose are 8, both]", panel=MODEL,
    )  # fmt: skip
    device: Texts = opt(
        None, "-dev", "--device", "DEVICE",
        "auto, cpu (or none), cuda:0 (or CUDA0), mps, or meta: no weights, memory and FLOPs only. "
        "[default: auto]", panel=MODEL,
    )  # fmt: skip
    cache_type_k: Texts = opt(
        None, "-ctk", "--cache-type-k", "TYPE",
        "Keys in the cache: f32, f16, bf16 … [default: that of the arithmetic]",
    )  # fmt: skip
    cache_type_v: Texts = opt(None, "-ctv", "--cache-type-v", "TYPE", "Values in the cache.")
    n_gpu_layers: Texts = opt(
        None, "-ngl", "--n-gpu-layers", "N", "Layers on the GPU; -1 for all. [default: -1]"
    )
    no_kv_offload: Texts = opt(
        None, "-nkvo", "--no-kv-offload", "0|1", "Keep the cache off the GPU. [default: 0]"
    )
    flash_attn: Texts = opt(
        None, "-fa", "--flash-attn", "on|off|auto", "Fused attention. [default: auto]"
    )
    embeddings: Texts = opt(
        None, "-embd", "--embeddings", "0|1", "Embeddings instead of logits. [default: 0]"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is measured and shown."""

    panel: ClassVar[str] = RUNS
    repetitions: int = opt(
        5, "-r", "--repetitions", "N", "Runs of each test.", at_least=1, at_most=1_000_000
    )
    delay: float = opt(
        0.0, "--delay", "SECONDS", "Pause before each test. [default: 0]",
        at_least=0, at_most=86_400,
    )  # fmt: skip
    no_warmup: bool = opt(False, "--no-warmup", "No runs before those that count.")
    output: Format | None = opt(
        None, "-o", "--output", "FORMAT",
        "Format on stdout: csv, json, jsonl, md, sql or none. [default: md]",
    )  # fmt: skip
    progress: bool = opt(False, "--progress", "A line on stderr for every run.")
    verbose: bool = opt(False, "-v", "--verbose", "Machine, ceilings and loads on stderr.")
    ignored: Texts = opt(None, *IGNORED, "VALUE", "Has no effect.", hidden=True)


@dataclass(frozen=True, kw_only=True)
class OurOptions:
    """What llama-bench has not."""

    panel: ClassVar[str] = OURS
    against: Literal["transformers", "llama.cpp"] | None = opt(
        None, "--against", "ENGINE",
        "Measure transformers or llama.cpp on the same weights, too, the runs of both in turns.",
    )  # fmt: skip
    random_weights: bool = opt(
        False, "--random-weights",
        "The model from its configuration alone, its weights drawn with --seed.",
    )  # fmt: skip
    seed: int = opt(
        0, "--seed", "N", "Seed of the random tokens. [default: 0]",
        at_least=0, at_most=2**63 - 1,
    )  # fmt: skip
    no_ceilings: bool = opt(
        False, "--no-ceilings",
        "Do not measure what the machine can do at most, which takes a second; the share of the "
        "roofline is left out.",
    )  # fmt: skip
    revision: str | None = opt(None, "--revision", "REV", "Branch, tag or commit on the hub.")
    quantize: Literal["auto", "none", "int8", "int4"] = opt(
        "auto", "--quantize", "FORMAT",
        "Weight format: auto (the file's), none, int8 or int4.",
    )  # fmt: skip
    offline: bool = opt(False, "--offline", "Use only what is on this machine.")


@dataclass(frozen=True, kw_only=True)
class BenchOutput(OutputOptions):
    """As everywhere, without `-q`: short options are llama-bench's."""

    quiet: bool = opt(False, "--quiet", "No progress, notes or warnings.", panel=OUTPUT)
