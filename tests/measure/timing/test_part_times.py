"""From marks to parts: every moment is in one of them, and the trace's spans lie in each other."""

from array import array

import pytest

from llmcli.anatomy.graph import graph
from llmcli.commands.timing.measure.clock import Marks, in_order, over_layers, part_times, pieces
from llmcli.families import find
from llmcli.records.work import PartWork

MODEL = graph(
    find("qwen3", "safetensors").from_hf({
        "model_type": "qwen3", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 96, "tie_word_embeddings": True,
    })
)  # fmt: skip
ORDER = in_order(MODEL)
CALL = (
    "step", "embed", "blocks.0.resid_pre", "blocks.0.ln1.out", "blocks.0.attn.k", "blocks.0.attn.v",
    "blocks.0.attn.k_norm", "blocks.0.attn.k_rot", "blocks.0.attn.z", "blocks.0.attn_out",
    "blocks.0.resid_mid", "blocks.0.ln2.out", "blocks.0.mlp.gate", "blocks.0.mlp.up",
    "blocks.0.mlp.act", "blocks.0.mlp.post", "blocks.0.mlp_out", "blocks.0.resid_post",
    "blocks.1.resid_pre", "blocks.1.ln1.out", "ln_final.out", "logits_raw", "logits",
)  # fmt: skip


def marks(*names, each=1.0, host=0.5):
    return Marks(
        names=names, seconds=array("d", [each] * len(names)), host_s=array("d", [host] * len(names))
    )


def run_of(*names):
    return list(pieces(marks(*names), MODEL))


def times(parts):
    return {(part.part, part.layer): part.seconds for part in parts}


def test_each_mark_is_the_end_of_its_part():
    parts = part_times(run_of(*CALL, "end"), (), {}, ORDER)
    assert times(parts) == {
        ("embed", None): 2.0,  # with the sum of the positions, which `resid_pre` is
        ("norm", 0): 3.0, ("norm", 1): 1.0, ("norm", None): 1.0,
        ("qkv", 0): 2.0, ("rope", 0): 1.0, ("attention", 0): 1.0, ("out", 0): 1.0,
        ("ffn_up", 0): 2.0, ("ffn_act", 0): 2.0, ("ffn_down", 0): 1.0, ("residual", 0): 2.0,
        ("head", None): 2.0, ("gaps", None): 3.0,
    }  # fmt: skip
    assert sum(part.host_s for part in parts) == pytest.approx(0.5 * (len(CALL) + 1))
    # neighbours of one part are computed once, and others as often as they come
    parts = part_times(run_of(*CALL, *CALL, "end"), (), {}, ORDER)
    calls = {(part.part, part.layer): part.calls for part in parts}
    assert calls["qkv", 0] == 2  # q|k|v are one product a call
    assert calls["norm", 0] == 6  # ln1, keys and queries, ln2
    assert calls["head", None] == 2
    # a name that nobody knows is a gap
    parts = part_times(run_of("step", "blocks.0.attn.magic", "logits", "end"), (), {}, ORDER)
    assert times(parts) == {("head", None): 1.0, ("gaps", None): 3.0}


def test_parts_come_in_the_order_of_the_work_and_take_it_with_them():
    works = (
        ("embed", None, PartWork(weights=3)),
        ("norm", 0, PartWork(weights=5)),
        ("out", 7, PartWork(flops=11)),  # never timed
    )
    run = run_of("sample", *CALL, "end")
    parts = part_times(run, works, {("norm", 0): 4, ("gaps", None): 9}, ORDER)
    assert [(part.part, part.layer) for part in parts[:2]] == [("embed", None), ("norm", 0)]
    assert parts[-1].part == "gaps"
    assert parts[0].work == PartWork(weights=3)
    assert sum(part.work.flops for part in parts) == 0
    assert [(p.part, p.operations) for p in parts if p.operations] == [("norm", 4), ("gaps", 9)]
    totals = over_layers(parts, ORDER)
    assert [part.part for part in totals][-2:] == ["sample", "gaps"]
    assert sum(part.operations for part in totals) == 13
    assert sum(part.seconds for part in totals) == sum(part.seconds for part in parts)
    assert next(part for part in totals if part.part == "norm").work == PartWork(weights=5)


def test_a_token_belongs_to_the_call_that_reads_it_and_what_comes_last_to_the_last():
    run = run_of("sample", *CALL, "sample", *CALL, "end")
    assert {piece.call for piece in run} == {0, 1}
    assert [piece.call for piece in run if piece.part == "sample"] == [0, 1]
    assert run[-1].call == 1


def test_calls_of_a_prompt_without_logits_are_calls_too():
    run = run_of(*CALL[:-3], *CALL[:-3], *CALL, "end")
    assert {piece.call for piece in run} == {0, 1, 2}
    assert [piece.call for piece in run if piece.part == "embed"] == [0, 1, 2]
    assert [piece.call for piece in run if piece.place == ("head", None)] == [2]
    assert run[-1].call == 2
    assert sum(piece.seconds for piece in run) == 3 * len(CALL) - 6 + 1
