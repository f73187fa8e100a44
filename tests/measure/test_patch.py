"""Patching: each cell is one pass with one edit, the ends are the two runs, faults turn it red."""

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


def put(value, here, there, heads=slice(None)):
    """The function of an edit, for activations that have the rows of all tokens."""
    def fn(x, positions):
        if x.ndim == 3:
            x[0, here] = value[there]
        else:
            x[0, heads, here] = value[heads, there]
        return x

    return fn


def places(model):
    """Some leaf of every mixer with heads, the stream, and what the parts add."""
    whole = graph(model.config)
    found = ["resid_pre", "attn_out"]
    for node in whole.mixers.values():
        found.append(node.name.split(".", 2)[2])
    leaves = {one for one in found if any(n.endswith(f".{one}") for n in whole.nodes)}
    return [one for one in sorted(leaves) if all(
        not whole[n].tap_only for n in whole.nodes if n.endswith(f".{one}"))]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_a_pass_with_one_edit(kind):
    model = random_model(MODELS[kind])
    whole, late = graph(model.config), graph(model.config).readers
    for at, what in enumerate(places(model)):
        for prompts in ((CLEAN, CORRUPTED), (CLEAN, LONGER)):
            noising = bool(at % 2)
            report = patch(model, what, prompts, noising=noising)
            assert report.ok, (what, report.checks)
            (clean, kept), (corrupted, others) = (run(model, ids) for ids in prompts)
            assert (report.clean_number, report.corrupted_number) == pytest.approx(
                (clean, corrupted), abs=1e-9)  # fmt: skip
            base, value = (prompts[0], others) if noising else (prompts[1], kept)
            pairs = [(b, a) if noising else (a, b) for a, b in report.aligned]
            for cell in report.cells[:: 1 if at else 3]:
                if cell.layer >= late:  # computed for the last token alone
                    continue
                some = pairs
                if cell.position is not None:
                    some = [p for p, q in zip(pairs, report.aligned) if q[0] == cell.position]
                there, here = (list(one) for one in zip(*some, strict=True))
                heads = slice(None) if cell.head is None else [cell.head]
                if cell.head is not None:
                    def fn(x, positions, there=there, here=here, cell=cell):
                        x[0, cell.head, here] = value[cell.name][cell.head, there]
                        return x
                else:
                    fn = put(value[cell.name], here, there, heads)
                number, _ = run(model, base, Edit(name=cell.name, fn=fn))
                assert cell.number == pytest.approx(number, abs=1e-9), cell
                share = (number - corrupted) / (clean - corrupted)
                assert cell.value == pytest.approx(share, abs=1e-7)
                if cell.position is not None and cell.position < report.first:
                    assert cell.value == report.base
            assert whole is not None
