"""What is measured: the options of llama-bench that take lists, by its names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from llmcli.cli.options import MODEL

TESTS, SWEPT = "Tests", "Swept (lists as for tests)"

Texts = list[str] | None


def option(panel: str, *names: str, metavar: str | None = None, help: str) -> Any:
    """One option under the heading `panel`."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=help)


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """What is measured, on which models."""

    model: Annotated[
        Texts,
        option(
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
        option(MODEL, "-hf", "-hfr", "--hf-repo", metavar="ORG/NAME", help="A model on the hub."),
    ] = None
    hf_file: Annotated[
        Texts, option(MODEL, "-hff", "--hf-file", metavar="FILE", help="One file of --hf-repo.")
    ] = None
    hf_token: Annotated[
        str | None,
        option(
            MODEL, "-hft", "--hf-token", metavar="TOKEN", help="For the hub, instead of $HF_TOKEN."
        ),
    ] = None
    n_prompt: Annotated[
        Texts,
        option(
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
        option(
            TESTS, "-n", "--n-gen", metavar="N", help="Texts of so many new tokens. [default: 128]"
        ),
    ] = None
    n_pg: Annotated[
        Texts,
        option(
            TESTS,
            "-pg",
            metavar="PP,TG",
            help="A prompt and new tokens after it, in one run; may be repeated.",
        ),
    ] = None
    n_depth: Annotated[
        Texts,
        option(
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
        option(
            SWEPT,
            "-b",
            "--batch-size",
            metavar="N",
            help="Tokens of a prompt handed over at once. [default: 2048]",
        ),
    ] = None
    ubatch_size: Annotated[
        Texts,
        option(
            SWEPT,
            "-ub",
            "--ubatch-size",
            metavar="N",
            help="Tokens of a prompt computed at once. [default: 512]",
        ),
    ] = None
    threads: Annotated[
        Texts,
        option(
            MODEL,
            "-t",
            "--threads",
            metavar="N",
            help="CPU threads. [default: OMP_NUM_THREADS, else one per core]",
        ),
    ] = None
    dtype: Annotated[
        Texts,
        option(
            MODEL,
            "--dtype",
            metavar="DTYPE",
            help="Arithmetic: auto, float64, float32, bfloat16 or float16. [default: auto]",
        ),
    ] = None
    device: Annotated[
        Texts,
        option(
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
        option(
            SWEPT,
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            help="Keys in the cache: f32, f16, bf16 … [default: that of the arithmetic]",
        ),
    ] = None
    cache_type_v: Annotated[
        Texts,
        option(SWEPT, "-ctv", "--cache-type-v", metavar="TYPE", help="Values in the cache."),
    ] = None
    n_gpu_layers: Annotated[
        Texts,
        option(
            SWEPT,
            "-ngl",
            "--n-gpu-layers",
            metavar="N",
            help="Layers on the GPU; -1 for all. [default: -1]",
        ),
    ] = None
    no_kv_offload: Annotated[
        Texts,
        option(
            SWEPT,
            "-nkvo",
            "--no-kv-offload",
            metavar="0|1",
            help="Keep the cache off the GPU. [default: 0]",
        ),
    ] = None
    flash_attn: Annotated[
        Texts,
        option(
            SWEPT,
            "-fa",
            "--flash-attn",
            metavar="on|off|auto",
            help="Fused attention. [default: auto]",
        ),
    ] = None
    embeddings: Annotated[
        Texts,
        option(
            SWEPT,
            "-embd",
            "--embeddings",
            metavar="0|1",
            help="Embeddings instead of logits. [default: 0]",
        ),
    ] = None
