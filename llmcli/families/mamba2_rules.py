"""Tensor names of the Mamba-2 mixer in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.config import ModelConfig
from llmcli.families.rules import LogNeg, Rename, Reshape, Rows
from llmcli.parts.ssm.config import SsmConfig


def rules_hf(config: ModelConfig, source: str) -> Iterator[Rename]:
    """Rules for transformers' names; `source` is the mixer: `model.layers.{layer}.mamba`."""
    if (ssm := _found_in(config)) is None:
        return
    b = "blocks.{layer}.ssm"
    yield from _projections(ssm, f"{source}.in_proj", f"{source}.out_proj")
    yield Rename(f"{source}.conv1d.weight", f"{b}.w", Reshape((ssm.channels, ssm.length)))
    yield Rename(f"{source}.conv1d.bias", f"{b}.b")
    yield Rename(f"{source}.norm.weight", f"{b}.norm.w")
    for leaf in ("A_log", "dt_bias", "D"):
        yield Rename(f"{source}.{leaf}", f"{b}.{leaf}")


def rules_gguf(config: ModelConfig) -> Iterator[Rename]:
    """Rules for llama.cpp's names; `ssm_a` is −exp(A_log); it and `ssm_d` are columns."""
    if (ssm := _found_in(config)) is None:
        return
    g, b, column = "blk.{layer}", "blocks.{layer}.ssm", Reshape((ssm.heads,))
    yield from _projections(ssm, f"{g}.ssm_in", f"{g}.ssm_out")
    yield Rename(f"{g}.ssm_conv1d.weight", f"{b}.w", Reshape((ssm.channels, ssm.length)))
    yield Rename(f"{g}.ssm_conv1d.bias", f"{b}.b")
    yield Rename(f"{g}.ssm_norm.weight", f"{b}.norm.w", Reshape((ssm.inner,)))
    yield Rename(f"{g}.ssm_dt.bias", f"{b}.dt_bias")
    yield Rename(f"{g}.ssm_a", f"{b}.A_log", column, LogNeg())
    yield Rename(f"{g}.ssm_d", f"{b}.D", column)


def _projections(ssm: SsmConfig, enter: str, leave: str) -> Iterator[Rename]:
    """Rules for the input matrix (rows: gates, x, B, C, dt) and the output matrix."""
    b, first = "blocks.{layer}.ssm", 0
    for leaf, size in (("gate", ssm.inner), ("in", ssm.channels), ("dt", ssm.heads)):
        rows = Rows(first, first + size)
        first = rows.stop
        yield Rename(f"{enter}.weight", f"{b}.W_{leaf}", rows)
        yield Rename(f"{enter}.bias", f"{b}.b_{leaf}", rows)
    yield Rename(f"{leave}.weight", f"{b}.W_out")
    yield Rename(f"{leave}.bias", f"{b}.b_out")


def _found_in(config: ModelConfig) -> SsmConfig | None:
    """The mixer of the first layer that has one; all mixers of a model are equal."""
    parts = (part for layer in config.layers for part in layer.parts)
    return next((part for part in parts if isinstance(part, SsmConfig)), None)
