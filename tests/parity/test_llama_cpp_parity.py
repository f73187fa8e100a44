"""llama.cpp gives the same log-probabilities for a small GGUF file of every architecture.

Where llama-cpp-python is installed, which CI does not do: it compiles for minutes.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from parity_gguf import write_gguf
from parity_models import build, opened, prompt
from zoo import PACKED, packed, variant

# values of gated DeltaNet are as long as keys there
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
# what a file can say and llama.cpp reads: windows of EXAONE 4 only where there are 64 layers
_CHANGES = {
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "ministral3": variant("ministral3-betas").overrides,
    "qwen3_5_text": _DELTA,
    # the last layers read the keys of the last two before them, one of each kind
    "gemma4_text": {"layer_types": ["sliding_attention"] * 2 + [
        "full_attention", "sliding_attention", "full_attention"
    ]},
}  # fmt: skip
# mixtures: groups of softmaxes have a score of their own there, the norms of latents the eps of
# all, and yarn's ramp is between whole numbers
_MIXTURES = {
    "mixtral": {}, "qwen2_moe": {}, "qwen3_moe": {}, "olmoe": {"num_key_value_heads": 6},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1500.0}},
    "glm4_moe": {}, "glm4_moe-plain": {}, "glm4_moe_lite-experts": {},
    "deepseek_v2-experts": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3-experts": {"rms_norm_eps": 1e-6}, "gemma4-experts": {}, "lfm2_moe": {},
    "qwen3_next": _DELTA, "qwen3_5_moe": _DELTA,
}  # fmt: skip
_FLOAT32 = 0  # `GGML_TYPE_F32`


@pytest.mark.parametrize("name", [*PACKED, *_MIXTURES])
def test_llama_cpp_agrees(name, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    file = tmp_path / "model.gguf"
    if (changes := _MIXTURES.get(name)) is None:
        one = packed(name, **_CHANGES.get(name, {}))
    else:
        one = variant(name)
        one = replace(one, overrides={**one.overrides, **changes})
    write_gguf(build(one, seed=3), file, "F32", tokenizer="none")
    ids = prompt(tokens=40)[0].tolist()
    model = opened(file, "float32")
    ours = model.decoder(torch.tensor([ids]))[0].double().log_softmax(-1)
    peer = llama_cpp.Llama(
        str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1, type_k=_FLOAT32,
        type_v=_FLOAT32, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,  # as the file says
    )  # fmt: skip
    peer.eval(ids)
    theirs = torch.tensor(np.array(peer.scores[: len(ids)])).double().log_softmax(-1)
    peer.close()
    assert (ours - theirs).abs().max() < 5e-3
