"""Fused groups computed in pieces: each piece has its time, and all give what the kernels gave."""

import pytest
import torch
from blocks import configure
from covers import covered, in_turn
from decoder_parameters import replace_weight
from small_models import ids
from timed_models import red, small, timed
from zoo import BLOCKS, CONFIGS

from llmcli.parts.conv.config import ShortConvConfig

PIECES = {
    "qkv": ("q", "k", "v"), "attention": ("scores", "softmax", "mix"), "ffn_up": ("gate", "up"),
    "conv_in": ("B", "gate", "x"), "shared": ("gate", "up"),
}  # fmt: skip


@pytest.mark.parametrize("name", covered(CONFIGS))
def test_pieces_compute_what_the_kernels_do_in_every_kind_of_model(name):
    report = timed(small(name, torch.float64), batch=2, unfused=True)
    assert not red(report) - {"adds_up"}
    assert report.checks[-1].name == "pieces"
    gated = any(layer.parts[-1].gated for layer in CONFIGS[name].layers)
    groups = ("qkv", "attention", *(("ffn_up",) if gated else ()))
    found = {(split.phase, split.part): split for split in report.splits}
    assert set(found) == {(phase, g) for phase in ("prefill", "decode") for g in groups}
    for (phase, group), split in found.items():
        assert tuple(piece for piece, _ in split.pieces) == PIECES[group]
        assert all(seconds > 0 for _, seconds in split.pieces)
        totals = next(p for p in report.phases if p.name == phase).totals
        assert split.group_s == next(p.seconds for p in totals if p.part == group)


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(covered(BLOCKS), [torch.float64, torch.bfloat16])
)
def test_pieces_of_other_blocks(name, dtype):
    """Rows of the stream itself, and projections that are none of the pieces."""
    report = timed(small(name, dtype), batch=2, unfused=True)
    assert not red(report) - {"adds_up"}
    latent = {"qkv": ("kv_latent", "k_pe", "q", "q_pe", "k", "v")}  # in other layers k and v
    pieces = PIECES | (latent if name == "latent attention" else {})
    pieces |= {"linear_in": ("gate", "in", "dt_in") if name.startswith("mamba-2") else
               ("in", "gate", "beta_in", "decay_in")}  # fmt: skip
    pieces |= {"qkv": ("q", "k", "v", "gate")} if name == "gated attention" else {}
    # values that are keys have no projection of their own
    pieces |= {"qkv": ("q", "k")} if name.startswith("values that are") else {}
    for split in report.splits:
        assert {*(piece for piece, _ in split.pieces)} == {*pieces[split.part]}
    convolves = any(isinstance(part, ShortConvConfig) for part in BLOCKS[name].layers[0].parts)
    assert convolves == ("conv_in" in {split.part for split in report.splits})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qk norm", "window", "layers that differ"])
def test_so_they_do_in_narrower_numbers(name, dtype):
    assert not red(timed(small(name, dtype), unfused=True)) - {"adds_up"}


@pytest.mark.parametrize("name", ["llama", "window"])
def test_more_queries_than_are_taken_at_a_time(name):
    report = timed(small(name, torch.float64), ids(1, 600)[0].tolist(), unfused=True)
    assert not red(report) - {"adds_up"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", ["attn.W_q", "attn.W_v", "mlp.W_gate", "mlp.W_up", "mask"])
def test_a_wrong_piece_turns_the_footer_red(piece, dtype):
    model, name = small("llama", dtype), f"blocks.1.{piece}"
    if piece == "mask":
        configure(model.decoder.blocks[1].mixers[0], window=4)
    else:
        replace_weight(model.decoder, name, 1.2 * model.decoder.weight(name).dense())
    report = timed(model, unfused=True)
    assert red(report) - {"adds_up"} == {"pieces"}
    where = ".attn.z (" if piece == "mask" else name.replace("W_", "")
    assert where in report.checks[-1].where


def test_a_nan_in_a_piece_is_worse_than_any_other_difference():
    model = small("llama")
    for name, factor in (("blocks.0.attn.W_q", torch.nan), ("blocks.1.attn.W_q", 100)):
        replace_weight(model.decoder, name, model.decoder.weight(name).dense() * factor)
    report = timed(model, unfused=True)
    assert red(report) - {"adds_up"} == {"pieces"}
    assert report.checks[-1].where == "blocks.0.attn.q (prefill)"
