"""Sinks, clamped gates and yarn that is not truncated are transformers', in float64.

Of gpt-oss with a single expert, of which the router always chooses all: a dense feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from decoder_parameters import parameters_of
from parity_reference import fresh_rope, precision
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from llmcli.commands.attention.measure.run import measure_attention
from llmcli.config import ModelConfig, sequential
from llmcli.engine.session import Session
from llmcli.families.rope import rope_from_hf
from llmcli.families.values import Values
from llmcli.model import Model
from llmcli.nn.decoder import Decoder
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import GateClamp, MlpConfig
from llmcli.parts.norm.config import NormConfig

# as it is published, but for sizes, and for a limit that small numbers reach
SETTINGS: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "swiglu_limit": 0.7,
    "num_local_experts": 1, "num_experts_per_tok": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1500.0, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 512,
    },
}  # fmt: skip
TOKENS = 41
NORMS = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}


def reference() -> GptOssForCausalLM:
    torch.manual_seed(3)
    config = GptOssConfig(
        **SETTINGS, attn_implementation="eager", experts_implementation="eager"
    )
    model = cast("Any", GptOssForCausalLM(config)).double().eval()
    for name, parameter in model.named_parameters():
        size = 0.3 if name.endswith(("bias", "norm.weight")) else 1.2 * parameter.shape[-1] ** -0.5
        center = 1.0 if "norm" in name else 0.0
        size = 2.0 if name.endswith("sinks") else size
        parameter.data = center + size * torch.randn(parameter.shape, dtype=torch.float64)
    return cast("GptOssForCausalLM", model)


def ours(theirs: GptOssForCausalLM, **attention: Any) -> Decoder:
    decoder = Decoder(config(**attention), device="cpu", dtype=torch.float64)
    state = theirs.state_dict()
    slots = parameters_of(decoder)
    for name, tensor in converted(state):
        if name in slots:
            slots.pop(name).copy_(tensor)
    assert not slots
    return decoder


def config(*, sinks: bool = True, clamp: GateClamp | None = None) -> ModelConfig:
    said = Values(SETTINGS)
    norm = NormConfig(kind="rms", eps=said.number("rms_norm_eps"))
    mixers = [
        AttentionConfig(
            heads=6, kv_heads=2, head_dim=16, value_dim=16, scale=16**-0.5, qkv_bias=True,
            out_bias=True, sinks=sinks, window=None if number % 2 else 5,
            rope=rope_from_hf(said, head_dim=16, context=512),
        )
        for number in range(4)
    ]  # fmt: skip
    mlp = MlpConfig(
        hidden=40, activation="quick_gelu", gated=True, bias=True,
        clamp=clamp or GateClamp(limit=said.number("swiglu_limit"), offset=1.0),
    )  # fmt: skip
    return ModelConfig(
        family="test", model_type="test", vocab=211, width=48, context=512,
        layers=tuple(sequential(mixer, mlp, norm=norm) for mixer in mixers),
        embedding=EmbeddingConfig(), final_norm=norm, head=HeadConfig(tied=False),
    )  # fmt: skip


def converted(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "embed.W", state["model.embed_tokens.weight"]
    yield "ln_final.w", state["model.norm.weight"]
    yield "head.W", state["lm_head.weight"]
    for i in range(4):
        layer, block = f"model.layers.{i}", f"blocks.{i}"
        for ln, norm in NORMS.items():
            yield f"{block}.{ln}.w", state[f"{layer}.{norm}.weight"]
        yield f"{block}.attn.sink", state[f"{layer}.self_attn.sinks"]
        for part in "qkvo":
            for kind, leaf in (("W", "weight"), ("b", "bias")):
                theirs = f"{layer}.self_attn.{part}_proj.{leaf}"
                yield f"{block}.attn.{kind}_{part}", state[theirs]
        experts = f"{layer}.mlp.experts"
        for at, part in enumerate(("gate", "up")):  # they take turns
            yield f"{block}.mlp.W_{part}", state[f"{experts}.gate_up_proj"][0, :, at::2].T
            yield f"{block}.mlp.b_{part}", state[f"{experts}.gate_up_proj_bias"][0, at::2]
        yield f"{block}.mlp.W_down", state[f"{experts}.down_proj"][0].T
        yield f"{block}.mlp.b_down", state[f"{experts}.down_proj_bias"][0]


@pytest.fixture(scope="module")
def theirs() -> GptOssForCausalLM:
    return reference()


IDS = torch.tensor([[(7 * i * i + 3 * i) % 211 for i in range(TOKENS)]])


def run(model: GptOssForCausalLM, **options: Any) -> Any:
    with precision(model), torch.inference_mode():
        fresh_rope(model)
        return model(IDS, use_cache=False, **options)


def logits(model: GptOssForCausalLM) -> Tensor:
    return cast("Tensor", run(model).logits)


@torch.inference_mode()
def test_whole_in_chunks_and_step_by_step(theirs: GptOssForCausalLM) -> None:
    expected, decoder = logits(theirs), ours(theirs)
    assert expected.abs().max() > 1
    assert (decoder(IDS) - expected).abs().max() < 1e-9
    for sizes in ((20, 20, 1), (1,) * TOKENS, (3, 1, 30, 7)):
        session = Session(decoder, 1, TOKENS)
        rows, first = [], 0
        for size in sizes:
            part = IDS[:, first : first + size].tolist()
            rows.append(session.extend(part, logits="all"))
            first += size
        assert (torch.cat(rows, 1) - expected).abs().max() < 1e-9


@torch.inference_mode()
def test_attention_alone(theirs: GptOssForCausalLM) -> None:
    """The module's output and its weights, of a windowed and of a full layer."""
    seen: dict[str, Tensor] = {}
    decoder = ours(theirs)
    decoder(IDS, tap=seen.__setitem__)
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        cast("Any", layer).self_attn.register_forward_hook(
            lambda _module, _inputs, out, at=at: outputs.__setitem__(at, out)
        )
        for at, layer in enumerate(theirs.model.layers)
    ]
    logits(theirs)
    for hook in hooks:
        hook.remove()
    for at, (out, weights) in outputs.items():
        assert (seen[f"blocks.{at}.attn_out"] - out).abs().max() < 1e-9
        attn = cast("Any", decoder.blocks[at].mixers[0])
        q, k = (seen[f"blocks.{at}.attn.{part}_rot"] for part in "qk")
        pattern = attn.attention_rows(q, k, 0)
        assert (pattern - weights).abs().max() < 1e-12
        assert 0.05 < float((1 - pattern.sum(-1)).max()) < 1


def test_the_view_tells_what_sinks_take(theirs: GptOssForCausalLM) -> None:
    decoder = ours(theirs)
    model = Model(
        name="small", config=decoder.config, decoder=decoder, tokenizer=None, checkpoint=None,
        eos_ids=frozenset(), random_seed=0,
    )  # fmt: skip
    report = measure_attention(model, IDS[0].tolist(), block_rows=16)
    assert report.ok, report.checks
    found = run(theirs, output_attentions=True).attentions
    for layer, weights in zip(report.layers, found, strict=True):
        assert layer.sinks
        taken = 1 - weights[0].sum(-1).mean(-1)
        for head in layer.heads:
            assert head.metrics["learned_sink"] == pytest.approx(float(taken[head.head]), abs=1e-12)


FAULTS: dict[str, Callable[[GptOssForCausalLM], Decoder]] = {
    "no sinks": lambda model: ours(model, sinks=False),
    "neurons without the 1": lambda model: ours(model, clamp=GateClamp(limit=0.7, offset=0.0)),
    "bounds that are never reached": lambda model: ours(
        model, clamp=GateClamp(limit=1e9, offset=1.0)
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, theirs: GptOssForCausalLM) -> None:
    assert (FAULTS[name](theirs)(IDS) - logits(theirs)).abs().max() > 1e-3


@torch.inference_mode()
def test_a_truncated_yarn_is_seen(
    theirs: GptOssForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {**SETTINGS["rope_parameters"], "truncate": True}
    monkeypatch.setitem(SETTINGS, "rope_parameters", rope)
    assert (ours(theirs)(IDS) - logits(theirs)).abs().max() > 1e-3
