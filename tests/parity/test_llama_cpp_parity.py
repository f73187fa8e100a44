"""llama.cpp gives the same log-probabilities for a small GGUF file of every architecture.

Where llama-cpp-python is installed, which CI does not do: it compiles for minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_gguf import write_gguf
from parity_models import build, prompt
from zoo import PACKED, packed, variant

from llmcli.checkpoints import open_checkpoint
from llmcli.loading import load_checkpoint

# what a file can say and llama.cpp reads: windows of EXAONE 4 only where there are 64 layers
_CHANGES: dict[str, Mapping[str, Any]] = {
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "ministral3": variant("ministral3-betas").overrides,
}
_FLOAT32 = 0  # `GGML_TYPE_F32`


@pytest.mark.parametrize("kind", PACKED)
def test_llama_cpp_agrees(kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    file = tmp_path / "model.gguf"
    write_gguf(build(packed(kind, **_CHANGES.get(kind, {})), seed=3), file, "F32", tokenizer="none")
    ids = prompt(tokens=40)[0].tolist()
    model = load_checkpoint(open_checkpoint(file), device="cpu", dtype="float32", text=False)
    ours = model.decoder(torch.tensor([ids]))[0].double().log_softmax(-1)
    peer = llama_cpp.Llama(
        str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1, type_k=_FLOAT32,
        type_v=_FLOAT32, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,  # as the file says
    )  # fmt: skip
    peer.eval(ids)
    theirs = torch.tensor(np.array(peer.scores[: len(ids)])).double().log_softmax(-1)
    peer.close()
    assert (ours - theirs).abs().max() < 5e-3
