"""Checkpoints of 16 bits that do not fit into memory stay in the mapped file, of every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_models import write
from zoo import ZOO

from llmcli.checkpoints import open_checkpoint
from llmcli.loading.load import load_checkpoint

TYPICAL = {one.model_type: one.name for one in ZOO if one.typical}


@pytest.mark.parametrize("name", TYPICAL.values(), ids=TYPICAL)
@torch.no_grad()
def test_sixteen_bits_stay_in_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same numbers; where all is in bfloat16, products side by side round alike."""
    case = next(one for one in ZOO if one.name == name)
    checkpoint = open_checkpoint(write(replace(case, dtype=torch.bfloat16), tmp_path))
    options = [{"dtype": "auto"}, {"dtype": "bfloat16"}]
    whole = [load_checkpoint(checkpoint, device="cpu", **one) for one in options]
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: 1)
    monkeypatch.setattr("llmcli.devices.require_memory", lambda *args: None)
    ids = torch.arange(3, 20)[None]
    for model, one in zip(whole, options, strict=True):
        mapped = load_checkpoint(checkpoint, device="cpu", **one)
        if mapped.decoder.formats or one["dtype"] == "bfloat16":
            assert mapped.mapped_bytes > 0
        expected, found = model.decoder(ids), mapped.decoder(ids)
        tolerance = 0.02 if model.decoder.dtype == torch.bfloat16 else 1e-6
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()
        state, mine = (one.decoder.new_state(1, 24) for one in (model, mapped))
        for token in ids[0, :4]:
            step = [
                one.decoder(token.view(1, 1), held)
                for one, held in ((model, state), (mapped, mine))
            ]
            assert (step[0] - step[1]).abs().max() <= tolerance * step[0].abs().max()
