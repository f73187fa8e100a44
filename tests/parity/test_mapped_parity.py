"""Checkpoints of 16 bits that do not fit into memory stay in the mapped file, of every kind."""

from dataclasses import replace

import pytest
import torch
from covers import COVER
from needs import needs_kernels
from parity_gguf import write_gguf
from parity_models import build, opened, without_room, write
from zoo import ZOO, packed

TYPICAL = {one.name: one.model_type for one in ZOO if one.typical and one.name in COVER}


@pytest.mark.parametrize("name", TYPICAL, ids=TYPICAL.values())
@torch.no_grad()
def test_sixteen_bits_stay_in_the_file(name, tmp_path, monkeypatch):
    """With the same numbers; where all is in bfloat16, products side by side round alike."""
    case = next(one for one in ZOO if one.name == name)
    folder, dtypes = write(replace(case, dtype=torch.bfloat16), tmp_path), ("auto", "bfloat16")
    whole = [opened(folder, dtype) for dtype in dtypes]
    without_room(monkeypatch)
    ids = torch.arange(3, 20)[None]
    for model, dtype in zip(whole, dtypes, strict=True):
        mapped = opened(folder, dtype)
        if mapped.decoder.arithmetic.formats or dtype == "bfloat16":
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


@needs_kernels
@pytest.mark.parametrize("format", ["Q4_0", "Q8_0"])
@torch.no_grad()
def test_experts_in_blocks_stay_in_the_file(format, tmp_path, monkeypatch):
    """Of many tokens and of one, whose experts are looked up by our kernel."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    write_gguf(build(packed("qwen3_moe", **sizes), seed=3), tmp_path / "m.gguf", format)
    whole = opened(tmp_path / "m.gguf")
    without_room(monkeypatch)
    mapped = opened(tmp_path / "m.gguf")
    assert mapped.mapped_bytes > 0.9 * mapped.weight_bytes
    ids = torch.arange(3, 20)[None]
    states = [model.decoder.new_state(1, 32) for model in (whole, mapped)]
    for part in (ids, ids[:, :1], ids[:, 1:2]):
        found = [
            model.decoder(part, state)
            for model, state in zip((whole, mapped), states, strict=True)
        ]
        assert torch.equal(*found)
