"""Sampling on a card: its kernel is compared with PyTorch's operations when it is first needed."""

from types import SimpleNamespace

import pytest
import torch
from card import Refused
from test_queued import SAMPLINGS, card  # noqa: F401

from llmcli.engine.sampler import Sampler
from llmcli.kernels import native
from llmcli.ops import on_card

DEFAULT = SAMPLINGS["default"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (None, ""),
        *((kept, "their tokens differ from PyTorch's") for kept in (1, 900, 0, 65, 40)),
        ("launch", "`choose` failed: no kernel image"),
    ],
)
def test_only_sampling_is_off_if_its_kernel_is_wrong(card, fault, why, monkeypatch):  # noqa: F811
    """A note says so once, and tokens are PyTorch's."""

    def choose(logits, k, numbers, u, *counts):
        calls.append(k)
        if fault == "launch":
            raise RuntimeError("no kernel image\nfor this device")
        ids, best = card.choose(logits, k, numbers, u, *counts)
        return ids + (fault == k), best

    calls, notes = [], []
    native.TRITON_STATE.warn = notes.append
    monkeypatch.setattr(on_card, "_kernels", lambda: SimpleNamespace(choose=choose))
    monkeypatch.setattr(on_card, "kernels", on_card.kernels.__wrapped__)
    rows, drawn = 2 * torch.randn(3, 2, 900, generator=torch.Generator().manual_seed(5)), []
    for device in ("cpu", "cuda:0", "cuda:0"):
        sampler = Sampler(DEFAULT, [[1], [2]], vocab=900, device=torch.device(device))
        checked = len(calls)
        drawn += [sampler.pick(one.to(device))[1] for one in rows]
    assert [[one.id for one in row] for row in drawn[:3]] == [
        [one.id for one in row] for row in drawn[3:6]
    ]
    assert drawn[3:6] == drawn[6:]
    assert len(calls) - checked == (0 if why else 3)
    assert calls[:5] == ([1] if fault == "launch" else [1, 900, 0, 65, 40])
    assert notes == [f"Triton's kernels for sampling are off: {why}"] * bool(why)
    kept = "attention, products, packed"
    status = f"{kept} (checked when first used); sampling off ({why})"
    if not why:
        status = f"{kept}, sampling (checked when first used)"
    assert native.triton_status() == status
    native.TRITON_STATE.off = "wrong"
    assert native.triton() == ()


@pytest.mark.parametrize(("groups", "checks"), [("sampling", False), ("sampling,packed", True)])
def test_a_decoder_is_not_checked_for_sampling_alone(card, groups, checks):  # noqa: F811
    native._groups = lambda: tuple(groups.split(","))  # until the card is gone
    assert on_card.checks(torch.device("cuda"), torch.float32) == checks
    native.TRITON_STATE.choices_checked = True
    when = "checked when first used" if checks else "checked"
    assert native.triton_status() == f"{groups.replace(',', ', ')} ({when})"


def test_a_guess_waits_for_its_token_alone(card):  # noqa: F811
    """Not for the copy of its random number."""
    sampler = Sampler(DEFAULT, [[1]], vocab=900, device=torch.device("cuda:0"))
    logits_1V = torch.ones(1, 900, device="cuda:0")
    with card.queued(), pytest.raises(Refused, match="the host reads a number"):
        sampler.guess(logits_1V, 2)
    assert sampler.guess(logits_1V, 2) == sampler.guess(logits_1V, 2) < 900
