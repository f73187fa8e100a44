"""Patching: each cell is one pass with one edit, the ends are the two runs, faults turn it red."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from covers import KINDS
from decoder_faults import red
from small_models import random_model
from zoo import MODELS

from llmcli.commands.patch import measure
from llmcli.commands.patch.measure import PatchRequest, align, measure_patch
from llmcli.commands.patch.view import patch_map, strongest
from llmcli.errors import UsageError
from llmcli.graph.edited import parse_edit
from llmcli.graph.graph import graph
from llmcli.graph.names import Names
from llmcli.inspect.sweep import Sweep
from llmcli.nn.step import Edit
from llmcli.shell.answer import Answer
from llmcli.ui.maps import pooled

CLEAN, CORRUPTED = (5, 17, 3, 17, 42, 8, 30), (5, 17, 9, 17, 42, 8, 30)
LONGER = (5, 17, 9, 11, 17, 42, 8, 30)  # 3 of these are as the last 4 of CLEAN
ANSWER = Answer(answer=3, versus=7)


def patch(model, what="resid_pre", prompts=(CLEAN, CORRUPTED), rows=None, **more):
    names = Names(model.config).select(f"blocks.*.{what}", ("activation",))
    request = PatchRequest(**{"what": what, "names": names, "answer": ANSWER, **more})
    return measure_patch(model, *prompts, request, rows=rows)


def run(model, ids, *edits):
    """The answer's number, and activations without a batch axis."""
    seen = {}
    logits = model.decoder(
        torch.tensor([ids]), edits=edits, tap=lambda name, x: seen.update({name: x[0].clone()})
    )
    return float(ANSWER.of(logits[0, -1])), seen


def put(value, here, there, head):
    """The function of an edit, for activations that have the rows of all tokens."""
    def fn(x, positions):
        if head is None:
            x[0, ..., here, :] = value[..., there, :]
        else:
            x[0, head, here] = value[head, there]
        return x

    return fn


def leaves(model):
    """The stream, what the mixers add, and their heads' results."""
    mixed = {node.name.split(".", 2)[2] for node in graph(model.config).mixers.values()}
    return ["resid_pre", "attn_out", *sorted(mixed)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_a_pass_with_one_edit(kind):
    model = random_model(MODELS[kind])
    for turn, what in enumerate(leaves(model)):
        for prompts in ((CLEAN, CORRUPTED), (CLEAN, LONGER)):
            report = patch(model, what, prompts, noising=bool(turn % 2))
            assert report.ok, report.checks
            (clean, kept), (corrupted, others) = (run(model, ids) for ids in prompts)
            numbers = report.clean_number, report.corrupted_number
            assert numbers == pytest.approx((clean, corrupted), abs=1e-9)
            base, value = (CLEAN, others) if report.noising else (prompts[1], kept)
            for cell in report.cells:
                if cell.layer >= graph(model.config).readers:
                    continue  # computed for the last token alone
                pairs = [p for p in report.aligned if cell.position in (None, p[0])]
                here, there = map(list, zip(*pairs, strict=True))
                here, there = (here, there) if report.noising else (there, here)
                edit = Edit(name=cell.name, fn=put(value[cell.name], here, there, cell.head))
                number, _ = run(model, base, edit)
                assert cell.number == pytest.approx(number, abs=1e-9), cell
                share = (number - corrupted) / (clean - corrupted)
                assert cell.value == pytest.approx(share, abs=1e-6), cell
                if cell.position is not None and cell.position < report.first:
                    assert cell.value == report.base


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_the_other_run_bit_for_bit_and_nothing_is_this_one(kind):
    model = random_model(MODELS[kind])
    report = patch(model, prompts=(CLEAN, (6, *CLEAN[1:5], 9, 30)), rows=1)
    found = {check.name: check.value for check in report.checks}
    assert found["all"] == found["before"] == 0
    assert found["nothing"] <= 1e-14  # of the last token a product may read a copy


@pytest.mark.parametrize("what", ["attn.pattern", "attn.q_rot", "mlp.post", "moe.expert_idx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_activation_that_is_computed_from(what, dtype):
    kind = "experts beside dense layers" if what.startswith("moe") else "llama"
    report = patch(random_model(MODELS[kind], dtype), what)
    assert report.ok, report.checks
    assert any(cell.value for cell in report.cells)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_path_is_the_senders_part_of_what_the_receiver_reads(kind):
    """Of a plain block: what the sender adds to the stream, and nothing of what follows from it."""
    model = random_model(MODELS[kind])
    last = len(model.config.layers) - 1
    kept, others = run(model, CLEAN)[1], run(model, CORRUPTED)[1]

    def added(name, at):
        def fn(x, positions):
            x[0, at] += kept["blocks.0.attn_out"][at] - others["blocks.0.attn_out"][at]
            return x

        return Edit(name=name, fn=fn)

    for to in (f"{last}.resid_post", f"{last}.attn.k[Hk=0,T=4:]"):
        receiver = parse_edit(f"{to}=zero", Names(model.config))
        report = patch(model, "attn_out", to=receiver)
        assert report.ok, report.checks
        for cell in report.cells[: len(CLEAN)]:
            if to.endswith("post"):
                number, _ = run(model, CORRUPTED, added(f"blocks.{last}.resid_post", cell.position))
            else:
                _, seen = run(model, CORRUPTED, added(f"blocks.{last}.resid_pre", cell.position))
                name, rows = f"blocks.{last}.attn.k", [4, 5, 6]
                number, _ = run(
                    model, CORRUPTED, Edit(name=name, fn=put(seen[name], rows, rows, 0))
                )
            assert cell.number == pytest.approx(number, abs=1e-9), cell
        moved = {cell.position for cell in report.cells if abs(cell.value) > 1e-9}
        assert moved == ({6} if to.endswith("post") else {4, 5, 6})
    same = patch(model, to=parse_edit("0.attn.k=zero", Names(model.config)))
    assert same.ok
    assert any(cell.value for cell in same.cells if not cell.layer)
    assert not any(cell.value for cell in same.cells if cell.layer), "the receiver comes before"


def test_prompts_are_aligned():
    assert align(CLEAN, CORRUPTED) == ([(at, at) for at in range(7)], 2)
    both = [(0, 0), (1, 1), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert align(CLEAN, LONGER) == (both, 2)
    assert align((1, 1), (1, 1, 1)) == ([(0, 0), (1, 2)], 1)
    with pytest.raises(UsageError, match="have the same tokens"):
        align(CLEAN, CLEAN)
    with pytest.raises(UsageError, match="have 2 and 1 token and end differently"):
        align((1, 2), (1,))


def test_the_default_answer_is_both_top_tokens():
    model = random_model(MODELS["llama"])
    nothing = Answer(answer=None, versus=None)
    report = patch(model, answer=nothing)
    tops = [int(model.decoder(torch.tensor([ids]))[0, -1].argmax()) for ids in (CLEAN, CORRUPTED)]
    assert [report.answer.id, getattr(report.versus, "id", tops[0])] == tops


@pytest.mark.parametrize(("more", "words"), [
    ({"by": "head"}, "`resid_pre` has no heads"),
    ({"positions": range(2, 3), "prompts": (CLEAN, LONGER)}, "none of the positions"),
    ({"what": "attn.pattern", "prompts": (CLEAN, LONGER)}, "a number for each key"),
    ({"what": "ln1.scale"}, "it cannot be edited"),
])  # fmt: skip
def test_refused(more, words):
    with pytest.raises(UsageError, match=words):
        patch(random_model(MODELS["llama"]), **more)


def test_a_receiver_after_the_prompt():
    model = random_model(MODELS["llama"])
    to = parse_edit("1.attn.q[T=7]=zero", Names(model.config))
    with pytest.raises(UsageError, match="the prompt has 7 tokens"):
        patch(model, to=to)


def test_nothing_is_shared_where_rotations_depend_on_the_length():
    report = patch(random_model(MODELS["longrope"]), prompts=((5, 17, 3, 30), (5, 17, 9, 11, 30)))
    assert report.ok, report.checks
    assert report.first == 0


def test_the_map():
    """Rows are positions, or heads; those before the first difference are one."""
    model = random_model(MODELS["llama"])
    report = patch(model, noising=True)
    drawn = patch_map(report)
    assert [name.split()[0] for name in drawn.names] == ["0–1", *"23456"]
    assert not drawn.values[0].any()
    for cell in report.cells:
        if cell.position >= 2:
            near = abs(cell.value - 1) < 1e-9  # rounding is no effect
            effect = 0 if near else cell.value - 1
            assert drawn.values[cell.position - 1, cell.layer] == effect
    assert len(strongest(report)) == 5
    heads = patch_map(patch(model, "z"))
    assert heads.values.shape == (model.config.layers[0].attention.heads, len(model.config.layers))
    for whole in (heads, replace(heads, values=-heads.values)):
        few, _ = pooled(whole, 3)
        assert len(few.names) < len(heads.names)
        assert np.array_equal(abs(few.values).max(0), abs(whole.values).max(0)), "the strongest"


def one_position_off(monkeypatch):
    put = measure._put
    monkeypatch.setattr(measure, "_put", lambda value, tokens, places, *head: put(
        value, tokens, [(max(0, a - 1), b) for a, b in places], *head))  # fmt: skip


def shared_too_far(monkeypatch):
    """The first token that differs is taken for one that does not."""
    monkeypatch.setattr(measure, "align", lambda *ids: (align(*ids)[0], align(*ids)[1] + 1))


def stale_cache(monkeypatch):
    """The cache is of another prompt."""
    monkeypatch.setattr(measure, "Sweep", lambda model, ids, **more: Sweep(
        model, [ids[0] + 1, *ids[1:]], **more))  # fmt: skip


def transposed(monkeypatch):
    sweep = Sweep.run

    def run(self, edits, tap=None):
        for some, logits in sweep(self, edits, tap):
            turned = [len(edits) - 3 - one if one < len(edits) - 2 else one for one in some]
            yield turned, logits

    monkeypatch.setattr(Sweep, "run", run)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("what", ["resid_pre", "z"])
@pytest.mark.parametrize(("fault", "check"), [
    (one_position_off, "all"), (shared_too_far, "before"),
    (stale_cache, "nothing"), (transposed, "alone"),
])  # fmt: skip
def test_a_fault_turns_a_check_red(monkeypatch, fault, check, what, dtype):
    model = random_model(MODELS["llama"], dtype)
    assert red(patch(model, what).checks) == set()
    fault(monkeypatch)
    assert check in red(patch(model, what).checks)
