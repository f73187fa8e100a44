"""GGUF files written with the gguf package give transformers' log-probabilities.

Rows of q and k interleaved, Conv1D transposed, packed blocks of every format, rotary scaling in
metadata or as a tensor of factors: read by us, and compared with transformers on the weights
that the gguf package decodes from the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covers import in_turn
from parity_gguf import interleave, separate, write_gguf
from parity_models import build, prompt
from parity_reference import load_reference, reference_logprobs
from safetensors.torch import save_file
from torch import Tensor
from zoo import PACKED, TYPES, ZOO, Variant, packed, variant

from llmcli.checkpoints import Checkpoint, open_checkpoint
from llmcli.config import Branch, ModelConfig
from llmcli.families import AddConstant, LogNeg, Op, Rename, Rule, translate
from llmcli.formats.packed import Mapped
from llmcli.kernels import native
from llmcli.loading.load import load_checkpoint
from llmcli.ops.quant import DECODERS
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.experts.config import ExpertsConfig

# d·q is exact in float32; d·q + m is not, so that float64 sees the decoder's rounding there
EXACT = {"F64", "F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0"}
ROUND_TRIPS = [one for one in ZOO if one.gguf]


@torch.no_grad()
def compare(
    folder: Path, one: Variant, format: str, *, head: bool = True, version: int = 3
) -> float:
    """Largest difference of log-probabilities over a long prompt in float64."""
    model = build(one, seed=3)
    file = folder / "model.gguf"
    write_gguf(model, file, format, head=head)
    with file.open("r+b") as header:
        header.seek(len(b"GGUF"))
        header.write(version.to_bytes(4, "little"))  # 2 and 3 differ in nothing else
    model.save_pretrained(folder / "hf")
    theirs = reference_logprobs(load_reference(folder / "hf", torch.float64), ids := prompt())
    ours = load_checkpoint(open_checkpoint(file), device="cpu", dtype="float64")
    return (ours.decoder(ids).log_softmax(-1) - theirs).abs().nan_to_num(torch.inf).max().item()


PLAIN_FORMATS = ["F64", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize(("model_type", "format"), in_turn(list(PACKED), PLAIN_FORMATS))
def test_every_format(model_type: str, format: str, tmp_path: Path) -> None:
    assert compare(tmp_path, packed(model_type), format) < (1e-9 if format in EXACT else 1e-5)


@pytest.mark.parametrize("format", sorted({*DECODERS} - EXACT - {"Q4_1", "Q5_1"}))
def test_super_blocks(format: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    one = packed("llama", **wide, num_hidden_layers=1)
    assert compare(tmp_path, one, format) < 1e-5


def super_blocked(model_type: str) -> Variant:
    """A small one whose rows are whole blocks of 256, too."""
    if model_type == "gpt2":
        return packed(model_type, n_embd=256, n_inner=512, n_head=8)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    own = TYPES[model_type]
    for key, value in (
        ("head_dim", 32), ("query_pre_attn_scalar", 32), ("num_key_value_heads", 2),
        ("global_head_dim", 64), ("hidden_size_per_layer_input", 256),
        ("linear_value_head_dim", 64),
    ):  # fmt: skip
        if key in own.base or key in own.blocks:
            sizes[key] = value
    if "kv_lora_rank" in own.base:
        sizes |= {"q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 32,
                  "num_key_value_heads": 8}  # fmt: skip
    if model_type == "lfm2":  # two thirds of it
        sizes |= {"intermediate_size": 768}
    if model_type == "mamba2":
        sizes = {"hidden_size": 256, "num_heads": 16}
    if model_type == "granitemoehybrid":
        sizes |= {"shared_intermediate_size": 512, "mamba_n_heads": 8}
    if model_type == "nemotron_h":
        sizes |= {"mamba_num_heads": 16}
    return packed(model_type, **sizes)


@pytest.mark.parametrize("model_type", PACKED)
def test_super_blocks_of_every_architecture(model_type: str, tmp_path: Path) -> None:
    assert compare(tmp_path, super_blocked(model_type), "Q4_K") < 1e-5


@pytest.mark.parametrize(
    ("model_type", "format"), in_turn(list(PACKED), ["Q4_0", "Q8_0", "Q4_K"])
)
@torch.no_grad()
def test_packed_weights_of_every_architecture(
    model_type: str, format: str, tmp_path: Path
) -> None:
    """Prompts and steps in the file's own bits, whose activations have 8: bits of divergence."""
    one = super_blocked(model_type) if format == "Q4_K" else packed(model_type)
    write_gguf(build(one, seed=3), tmp_path / "model.gguf", format)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    exact = load_checkpoint(checkpoint, device="cpu", dtype="float64").decoder
    ours = load_checkpoint(checkpoint, device="cpu").decoder
    assert format in ours.formats.values()
    ids = prompt(tokens=60)
    right = exact(ids).log_softmax(-1)
    state = ours.new_state(1, 60)
    found = [ours(ids[:, :50], state), *(ours(ids[:, i : i + 1], state) for i in range(50, 60))]
    for logits, their in zip(found, right.split([50, *[1] * 10], 1), strict=True):
        kl = (their.exp() * (their - logits.double().log_softmax(-1))).sum(-1).mean().item()
        assert 0 <= kl < (2e-3 if model_type == "gemma4_text" else 1e-3)  # 15 parts, not 4 to 8


@pytest.mark.parametrize("one", ROUND_TRIPS, ids=lambda one: one.name)
def test_variants(one: Variant, tmp_path: Path) -> None:
    assert one.gguf is not None
    assert compare(tmp_path, one, "F32") < one.gguf


LATENT = {
    "deepseek_v2": {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe",
            "glm4_moe", "gpt_oss", *LATENT)  # fmt: skip
HYBRIDS = ("granitemoehybrid", "nemotron_h")
BLOCKS = {"hidden_size": 96, "intermediate_size": 64}  # so that rows are whole ones


def mixed(model_type: str) -> Variant:
    """One whose experts have rows of whole blocks."""
    sizes = ("moe_intermediate_size", "shared_expert_intermediate_size",
             "shared_intermediate_size", "moe_shared_expert_intermediate_size")  # fmt: skip
    own = {size: 32 for size in sizes if size in TYPES[model_type].base}
    if "linear_value_head_dim" in TYPES[model_type].base:
        own |= {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    if model_type in LATENT:
        own |= TYPES["deepseek_v3"].blocks | LATENT[model_type] | {"n_group": 4, "topk_group": 2}
    if model_type == "nemotron_h":
        own |= {"head_dim": 16, "mamba_head_dim": 16}
    return Variant("mixed", model_type, BLOCKS | own)


@pytest.mark.parametrize(
    ("model_type", "format"), in_turn([*MIXTURES, *HYBRIDS], ["F16", "BF16", "Q8_0"])
)
def test_experts_in_one_tensor(model_type: str, format: str, tmp_path: Path) -> None:
    """Blocks are unpacked where a dtype is given."""
    assert compare(tmp_path, mixed(model_type), format) < 1e-9


@pytest.mark.parametrize("format", ["F16", "BF16"])
@torch.no_grad()
def test_experts_stay_in_16_bits(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(build(mixed("qwen2_moe"), seed=3), tmp_path / "model.gguf", format)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    monkeypatch.setattr("llmcli.devices.multiplies_bfloat16", lambda device: False)
    ours = load_checkpoint(checkpoint, device="cpu").decoder
    exact = load_checkpoint(checkpoint, device="cpu", dtype="float64").decoder
    held = "bfloat16" if format == "BF16" else "float16"
    for leaf in ("gate", "up", "down"):
        assert ours.weight(f"blocks.1.moe.W_{leaf}").format == held
    assert ours.dtype == torch.float32
    right = exact(ids := prompt(tokens=40)).log_softmax(-1)
    state = ours.new_state(1, 40)
    parts = [ours(part, state) for part in ids.split([30, *[1] * 10], 1)]
    for found in (ours(ids), torch.cat(parts, 1)):
        assert (found.log_softmax(-1) - right).abs().max() < 0.02  # keys and values: bfloat16


@pytest.mark.skipif(native.level() is None, reason="there are no kernels")
@pytest.mark.parametrize("model_type", [*MIXTURES, *HYBRIDS])
@torch.no_grad()
def test_experts_stay_in_blocks(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the file has them, or mapped where they do not fit; with the same bits."""
    config = mixed(model_type)
    write_gguf(build(config, seed=3), tmp_path / "model.gguf", "Q8_0")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    ours = load_checkpoint(checkpoint, device="cpu").decoder
    exact = load_checkpoint(checkpoint, device="cpu", dtype="float64").decoder
    router = next(one for one in reversed(ours.weight_names) if one.endswith("moe.W_router"))
    moe = router.removesuffix(".W_router")
    leaves = ("up", "down") if model_type == "nemotron_h" else ("gate", "up", "down")
    assert {ours.weight(f"{moe}.W_{leaf}").format for leaf in leaves} == {"Q8_0"}
    assert ours.weight(router).format == "float32"
    right = exact(ids := prompt(tokens=40)).log_softmax(-1)
    found = ours(ids)
    kl = (right.exp() * (right - found.double().log_softmax(-1))).sum(-1).mean().item()
    assert 0 <= kl < 5e-3  # some tokens take another expert where two are nearly as good
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: 1)
    monkeypatch.setattr("llmcli.devices.require_memory", lambda *args: None)
    mapped = load_checkpoint(checkpoint, device="cpu").decoder
    assert isinstance(mapped.weight(f"{moe}.W_up"), Mapped)
    assert torch.equal(mapped(ids), found)


@pytest.mark.skipif(native.level() is None, reason="there are no kernels")
@torch.no_grad()
def test_experts_are_quantized(tmp_path: Path) -> None:
    """Those that are one tensor, and those that are stored one by one."""
    model, found = build(mixed("qwen3_moe"), seed=3), []
    for folder in ("one", "each"):
        model.save_pretrained(tmp_path / folder)
    save_file(model.state_dict(), tmp_path / "one" / "model.safetensors", {"format": "pt"})
    for folder in ("one", "each"):
        checkpoint = open_checkpoint(tmp_path / folder)
        decoder = load_checkpoint(checkpoint, device="cpu", quantize="int8").decoder
        assert decoder.weight("blocks.1.moe.W_up").format == "Q8_0"
        found.append(decoder(prompt(tokens=9)))
    assert torch.equal(*found)


@pytest.mark.parametrize("format", ["F32", "Q4_0"])
def test_files_of_version_2(format: str, tmp_path: Path) -> None:
    assert compare(tmp_path, packed("llama"), format, version=2) < 1e-9


@pytest.mark.parametrize(  # no head of Nemotron-H is
    ("model_type", "head"), in_turn([one for one in PACKED if one != "nemotron_h"], [True, False])
)
def test_a_tied_head_stored_or_not(model_type: str, head: bool, tmp_path: Path) -> None:
    one = packed(model_type, tie_word_embeddings=True)
    assert compare(tmp_path, one, "F32", head=head) < 1e-9


def test_keys_and_values_of_latents_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the converter wrote them before llama.cpp kept latents."""
    monkeypatch.setattr("parity_gguf.BY_HEAD", False)
    assert compare(tmp_path, variant("deepseek_v3-yarn"), "F32") < 1e-9
    assert compare(tmp_path, packed("deepseek_v3", q_lora_rank=None), "F16") < 1e-9


@pytest.mark.parametrize("option", ["KEY_HEADS", "QKV"])
def test_other_names_of_qwen3_next(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the converter wrote them at first, and as it can write them."""
    monkeypatch.setattr(f"parity_gguf.{option}", True)
    assert compare(tmp_path, variant("qwen3_next"), "F32") < 1e-9
    assert compare(tmp_path, mixed("qwen3_next"), "Q8_0") < 1e-9


def with_parts(change: Callable[[object], object]) -> Callable[[ModelConfig], ModelConfig]:
    """A model with other parts."""

    def other(branch: Branch) -> Branch:
        return replace(branch, part=change(branch.part))

    return lambda config: replace(config, layers=tuple(
        replace(layer, sublayers=tuple(tuple(map(other, one)) for one in layer.sublayers))
        for layer in config.layers
    ))  # fmt: skip


def tiled(tiles: bool) -> Callable[[ModelConfig], ModelConfig]:
    """Value heads in llama.cpp's order, or in transformers'."""
    return with_parts(
        lambda part: replace(part, tiled=tiles) if isinstance(part, DeltaConfig) else part
    )


def unnormalized(part: object) -> object:
    """The weights of experts as they are."""
    if not isinstance(part, ExpertsConfig):
        return part
    return replace(part, routing=replace(part.routing, renormalized=False))


def with_operations(ops: Callable[[Rename], tuple[Op, ...]]) -> Callable[[Rule], Rule]:
    """Rules with other operations."""

    def change(rule: Rule) -> Rule:
        if not isinstance(rule, Rename):
            return rule
        return Rename(rule.source, rule.target, *ops(rule), within=rule.within)

    return change


# what is wrong with how a file is read: its variant, the model, its rules
DELTA: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig], Callable[[Rule], Rule]]] = {
    "value heads in transformers' order": ("qwen3_5", tiled(False), lambda rule: rule),
    "value heads in llama.cpp's order": ("qwen3_next", tiled(True), lambda rule: rule),
    "decays that are no logarithms": ("qwen3_5", lambda config: config, with_operations(
        lambda rule: tuple(op for op in rule.ops if not isinstance(op, LogNeg))
    )),
    "1 taken off the norm of outputs": ("qwen3_5_moe", lambda config: config, with_operations(
        lambda rule: (AddConstant(-1.0),) if "ssm_norm" in rule.source else rule.ops
    )),
    "1 not taken off the other norms": ("qwen3_next", lambda config: config, with_operations(
        lambda rule: tuple(op for op in rule.ops if not isinstance(op, AddConstant))
    )),
    "weights not renormalized": (
        "qwen3_5_moe", with_parts(unnormalized), lambda rule: rule,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DELTA)
def test_a_file_that_is_read_wrong_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, change, other = DELTA[name]

    def wrong(checkpoint: Checkpoint) -> tuple[ModelConfig, tuple[Rule, ...]]:
        config, rules = translate(checkpoint)
        return change(config), tuple(map(other, rules))

    monkeypatch.setattr("llmcli.loading.load.translate", wrong)
    assert compare(tmp_path, variant(one), "F32") > 1e-6


@pytest.mark.parametrize("model_type", sorted({*MIXTURES} - {"gpt_oss"}))
def test_gates_and_neurons_of_experts_in_one_tensor(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parity_gguf.GATE_UP", True)
    assert compare(tmp_path, mixed(model_type), "Q8_0") < 1e-9


def test_the_interleaving_is_undone() -> None:
    """Six rows of one head: 0 3 1 4 2 5 in the file."""
    rows = torch.arange(12)
    assert interleave(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert separate(interleave(rows, 2), 2).tolist() == rows.tolist()


def test_a_wrong_order_of_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(rows: Tensor, heads: int) -> Tensor:
        return rows

    monkeypatch.setattr("parity_gguf.interleave", plain)
    monkeypatch.setattr("parity_gguf.separate", plain)
    assert compare(tmp_path, packed("llama"), "F32") > 1e-2
