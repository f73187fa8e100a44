"""The engine over a real decoder with random weights: batched == alone == without any cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from continued import plain_loop, stream
from decoder_parameters import parameters_of

from llmcli.config.attention import AttentionConfig, RopeConfig, ScoreConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig, sequential
from llmcli.config.norm import NormConfig
from llmcli.decoder.decoder import Decoder
from llmcli.engine.sampling import Sampling
from llmcli.graph.arithmetic import Arithmetic
from llmcli.model import dtype_name

RMS = NormConfig(kind="rms", eps=1e-6)
VOCAB = 97
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20], [30, 31, 32], [5, 6, 7, 8]]
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "penalized greedy": Sampling(temperature=0, repetition_penalty=1.3),
    "sampled": Sampling(seed=9),
    "penalized": Sampling(temperature=1.5, top_k=0, presence_penalty=0.5, seed=9),
}


def real_model(dtype: torch.dtype, *, window: int | None = None, learned: bool = False) -> Any:
    mixer = AttentionConfig(
        heads=4, kv_heads=2, head_dim=8, value_dim=8,
        scores=ScoreConfig(scale=8**-0.5, window=window),
        rope=None if learned else RopeConfig(theta=1000.0, dims=8),
    )  # fmt: skip
    mlp = MlpConfig(hidden=32, activation="silu", gated=True)
    layer = sequential(mixer, mlp, norm=RMS)
    config = ModelConfig(
        family="test", model_type="test", vocab=VOCAB, width=24, context=64, layers=(layer,) * 2,
        embedding=EmbeddingConfig(positions=64 if learned else None), final_norm=RMS,
        head=HeadConfig(tied=False), eos=(0,),
    )  # fmt: skip
    decoder = Decoder(config, Arithmetic.of(dtype_name(dtype)), device="cpu")
    generator = torch.Generator().manual_seed(1)
    for slot in parameters_of(decoder).values():
        slot.copy_(torch.randn(slot.shape, generator=generator) * 0.4)
    return SimpleNamespace(
        config=config, decoder=decoder, tokenizer=None, eos_ids=frozenset({0}),
        device=decoder.device,
    )  # fmt: skip


def generate(model: Any, prompts: list[list[int]], sampling: Sampling, **options: Any):
    outputs: dict[int, list[int]] = {}
    for token in stream(model, prompts, sampling, **{"limit": 24, **options}):
        outputs.setdefault(token.sequence, []).append(token.id)
    return [outputs[sequence] for sequence in sorted(outputs)]


@pytest.mark.parametrize("variant", [{}, {"window": 3}, {"learned": True}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_batched_is_alone_is_without_cache(name, dtype, variant):
    model, sampling = real_model(dtype, **variant), SAMPLINGS[name]
    together = generate(model, PROMPTS, sampling)
    for prompt, ids in zip(PROMPTS, together, strict=True):
        assert ids == generate(model, [prompt], sampling)[0]
        assert ids == plain_loop(
            lambda whole: model.decoder(torch.tensor([whole]))[0, -1], prompt, sampling, 24, 0
        )
    assert len({tuple(ids) for ids in together}) == len(PROMPTS)


@pytest.mark.parametrize("learned", [False, True])
def test_a_full_context_is_used_to_the_last_slot(learned):
    model = real_model(torch.float64, learned=learned)
    prompts = [[7] * 60, [9] * 64, [3] * 50]
    got = generate(model, prompts, SAMPLINGS["sampled"], limit=1000, ignore_eos=True)
    assert [len(ids) for ids in got] == [5, 1, 15]
    for prompt, ids in zip(prompts, got, strict=True):
        alone = generate(model, [prompt], SAMPLINGS["sampled"], limit=1000, ignore_eos=True)
        assert alone == [ids]
