"""GGUF files written with the gguf package give transformers' log-probabilities.

Rows of q and k interleaved, Conv1D transposed, packed blocks of every format, rotary scaling in
metadata or as a tensor of factors: read by us, and compared with transformers on the weights
that the gguf package decodes from the same bytes.
"""

from dataclasses import replace
from itertools import cycle

import gguf
import numpy as np
import pytest
import torch
from covers import COVER, few, once
from needs import needs_kernels
from parity_gguf import interleave, write_gguf
from parity_models import build, opened, prompt, without_room, write
from parity_reference import load_reference, reference_logprobs
from safetensors.torch import save_file
from tiny_checkpoints import in_chunks
from zoo import PACKED, TYPES, ZOO, Variant, packed, variant

from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.ops.quant import DECODERS
from llmcli.weights.packed import MappedWeight

# d·q is exact in float32; d·q + m is not, so that float64 sees the decoder's rounding there
EXACT = {"F64", "F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0"}
PLAIN_FORMATS = ["F64", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@torch.no_grad()
def compare(folder, one, format, *, head=True, ways=()):
    """Largest difference of log-probabilities over a long prompt in float64."""
    model = build(one, seed=3)
    file = folder / "model.gguf"
    write_gguf(model, file, format, head=head, ways=ways)
    model.save_pretrained(folder / "hf")
    theirs = reference_logprobs(load_reference(folder / "hf", torch.float64), ids := prompt())
    ours = opened(file, "float64")
    return (ours.decoder(ids).log_softmax(-1) - theirs).abs().nan_to_num(torch.inf).max().item()


# sizes of which a row is whole blocks of 256, where a type has these keys
SUPER_BLOCKS = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32,
    "query_pre_attn_scalar": 32, "num_key_value_heads": 2, "global_head_dim": 64,
    "hidden_size_per_layer_input": 256, "linear_value_head_dim": 64,
    "shared_intermediate_size": 512,
}  # fmt: skip
OWN_SUPER_BLOCKS = {
    "gpt2": {"n_embd": 256, "n_inner": 512, "n_head": 8}, "lfm2": {"intermediate_size": 768},
    "deepseek_v3": {"q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 32,
                    "num_key_value_heads": 8},
    "mamba2": {"num_heads": 16}, "granitemoehybrid": {"mamba_n_heads": 8},
    "nemotron_h": {"mamba_num_heads": 16},
}  # fmt: skip


def super_blocked(model_type):
    """A small one whose rows are whole blocks of 256, too."""
    own = TYPES[model_type]
    sizes = {key: size for key, size in SUPER_BLOCKS.items() if {key} & {*own.base, *own.blocks}}
    return packed(model_type, **sizes | OWN_SUPER_BLOCKS.get(model_type, {}))


# Each architecture in one format, and each format in one architecture: the order of rows does not
# depend on how numbers are stored. Those whose turn was a plain format have a super-block, too.
SUPER_FORMATS = sorted({*DECODERS} - {*PLAIN_FORMATS})
IN_FORMATS = [*zip(PACKED, cycle(PLAIN_FORMATS + SUPER_FORMATS))]
IN_BOTH = zip((one for one, format in IN_FORMATS if format in PLAIN_FORMATS), cycle(SUPER_FORMATS))


@pytest.mark.parametrize(
    ("model_type", "format"), [*IN_FORMATS, *few([pytest.param(*one) for one in IN_BOTH], 0)]
)
def test_every_format_and_architecture(model_type, format, tmp_path):
    one = super_blocked(model_type) if format in SUPER_FORMATS else packed(model_type)
    assert compare(tmp_path, one, format) < (1e-9 if format in EXACT else 1e-5)


@needs_kernels
@pytest.mark.parametrize(("model_type", "format"), once(PACKED, ["Q4_0", "Q8_0", "Q4_K"]))
@torch.no_grad()
def test_packed_weights_of_every_architecture(model_type, format, tmp_path):
    """Prompts and steps in the file's own bits, whose activations have 8: bits of divergence."""
    one = super_blocked(model_type) if format == "Q4_K" else packed(model_type)
    write_gguf(build(one, seed=3), tmp_path / "model.gguf", format)
    exact, ours = (opened(tmp_path / "model.gguf", one).decoder for one in ("float64", "auto"))
    assert format in ours.precision.formats.values()
    ids = prompt(tokens=60)
    right = exact(ids).log_softmax(-1)
    state = ours.new_state(1, 60)
    found = [ours(ids[:, :50], state), *(ours(ids[:, i : i + 1], state) for i in range(50, 60))]
    for logits, their in zip(found, right.split([50, *[1] * 10], 1), strict=True):
        kl = (their.exp() * (their - logits.double().log_softmax(-1))).sum(-1).mean().item()
        assert 0 <= kl < (2e-3 if model_type == "gemma4_text" else 1e-3)  # 15 parts, not 4 to 8


LATENT = {
    "deepseek_v2": {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe",
            "glm4_moe", "gpt_oss", *LATENT)  # fmt: skip
HYBRIDS = ("granitemoehybrid", "nemotron_h")
BLOCKS = {"hidden_size": 96, "intermediate_size": 64}  # so that rows are whole ones


def mixed(model_type):
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


@pytest.mark.parametrize("one", [one for one in ZOO if one.gguf], ids=lambda one: one.name)
def test_variants(one, tmp_path):
    assert one.gguf is not None
    assert compare(tmp_path, one, "F32") < one.gguf


@pytest.mark.parametrize(
    ("model_type", "format"), once([*MIXTURES, *HYBRIDS], ["F16", "BF16", "Q8_0"])
)
def test_experts_in_one_tensor(model_type, format, tmp_path, monkeypatch):
    """Blocks are unpacked where a dtype is given, of a stack some rows at a time."""
    in_chunks(monkeypatch, 9_000)
    assert compare(tmp_path, mixed(model_type), format) < 1e-9


@pytest.mark.parametrize(("one", "format", "way"), [
    (variant("deepseek_v3-yarn"), "F32", "joined latents"),
    (packed("deepseek_v3", q_lora_rank=None), "F16", "joined latents"),
    *((variant("qwen3_next"), "F32", way) for way in ("by key head", "fused qkv")),
    *((mixed("qwen3_next"), "Q8_0", way) for way in ("by key head", "fused qkv")),
    *((mixed(one), "Q8_0", "fused gates") for one in sorted({*MIXTURES} - {"gpt_oss"})),
])  # fmt: skip
def test_other_ways_to_write_the_same(one, format, way, tmp_path):
    assert compare(tmp_path, one, format, ways=[way]) < 1e-9


@pytest.mark.parametrize(("model_type", "head"), once(PACKED[::3], [True, False]))
def test_a_tied_head_stored_or_not(model_type, head, tmp_path):
    one = packed(model_type, tie_word_embeddings=True)
    assert compare(tmp_path, one, "F32", head=head) < 1e-9


def test_the_interleaving_is_undone_and_a_file_without_it_is_seen(tmp_path):
    """Six rows of one head: 0 3 1 4 2 5 in the file."""
    rows = torch.arange(12)
    assert interleave(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert compare(tmp_path, packed("llama"), "F32", ways=["rows not interleaved"]) > 1e-2


@needs_kernels
@pytest.mark.parametrize("format", ["F16", "BF16"])
@torch.no_grad()
def test_experts_stay_in_16_bits(format, tmp_path, monkeypatch):
    write_gguf(build(mixed("qwen2_moe"), seed=3), tmp_path / "model.gguf", format)
    monkeypatch.setattr("llmcli.devices.multiplies_bfloat16", lambda device: False)
    exact, ours = (opened(tmp_path / "model.gguf", one).decoder for one in ("float64", "auto"))
    held = "bfloat16" if format == "BF16" else "float16"
    for leaf in ("gate", "up", "down"):
        assert ours.weight(f"blocks.1.moe.W_{leaf}").format == held
    assert ours.dtype == torch.float32
    right = exact(ids := prompt(tokens=40)).log_softmax(-1)
    state = ours.new_state(1, 40)
    parts = [ours(part, state) for part in ids.split([30, *[1] * 10], 1)]
    for found in (ours(ids), torch.cat(parts, 1)):
        assert (found.log_softmax(-1) - right).abs().max() < 0.02  # keys and values: bfloat16


@needs_kernels
@pytest.mark.parametrize(("model_type", "format"), [
    ("qwen3_moe", "Q4_0"), *((one, "Q8_0") for one in (*MIXTURES, *HYBRIDS)),
])  # fmt: skip
@torch.no_grad()
def test_experts_stay_in_blocks(model_type, format, tmp_path, monkeypatch):
    """As the file has them, some rows at a time, or mapped where they do not fit; the same bits.

    Of many tokens and of one, whose experts are looked up by our kernel.
    """
    write_gguf(build(mixed(model_type), seed=3), tmp_path / "model.gguf", format)
    exact = opened(tmp_path / "model.gguf", "float64").decoder
    in_chunks(monkeypatch, 900)
    ours = opened(tmp_path / "model.gguf").decoder
    router = next(one for one in reversed(ours.weight_names) if one.endswith("moe.W_router"))
    moe = router.removesuffix(".W_router")
    leaves = ("up", "down") if model_type == "nemotron_h" else ("gate", "up", "down")
    assert {ours.weight(f"{moe}.W_{leaf}").format for leaf in leaves} == {format}
    assert ours.weight(router).format == "float32"
    right = exact(ids := prompt(tokens=40)).log_softmax(-1)
    found = ours(ids)
    kl = (right.exp() * (right - found.double().log_softmax(-1))).sum(-1).mean().item()
    assert 0 <= kl < 5e-3  # some tokens take another expert where two are nearly as good
    without_room(monkeypatch)
    mapped = opened(tmp_path / "model.gguf").decoder
    assert isinstance(mapped.weight(f"{moe}.W_up"), MappedWeight)
    assert torch.equal(mapped(ids), found)
    states = [one.new_state(1, 48) for one in (ours, mapped)]
    for part in (ids, ids[:, :1], ids[:, 1:2]):
        assert torch.equal(ours(part, states[0]), mapped(part, states[1]))


@needs_kernels
@torch.no_grad()
def test_experts_are_quantized(tmp_path):
    """Those that are one tensor, and those that are stored one by one."""
    model, found = build(mixed("qwen3_moe"), seed=3), []
    for folder in ("one", "each"):
        model.save_pretrained(tmp_path / folder)
    save_file(model.state_dict(), tmp_path / "one" / "model.safetensors", {"format": "pt"})
    for folder in ("one", "each"):
        decoder = opened(tmp_path / folder, quantize="int8").decoder
        assert decoder.weight("blocks.1.moe.W_up").format == "Q8_0"
        found.append(decoder(prompt(tokens=9)))
    assert torch.equal(*found)


# What does not fit into memory stays in the mapped file.
TYPICAL = {one.name: one.model_type for one in ZOO if one.typical and one.name in COVER}


@pytest.mark.parametrize("name", TYPICAL, ids=TYPICAL.values())
@torch.no_grad()
def test_sixteen_bits_stay_in_the_file(name, tmp_path, monkeypatch):
    """With the same numbers; where all is in bfloat16, products side by side round alike."""
    case, dtypes = replace(variant(name), dtype=torch.bfloat16), ("auto", "bfloat16")
    folder = write(case, tmp_path)
    whole = [opened(folder, dtype) for dtype in dtypes]
    without_room(monkeypatch)
    ids = torch.arange(3, 20)[None]
    for model, dtype in zip(whole, dtypes, strict=True):
        mapped = opened(folder, dtype)
        if mapped.decoder.precision.formats or dtype == "bfloat16":
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


# Files of mixtures that lie: experts that are not there, more of them, of other shapes. Each is
# refused with one line that names the key or the tensor, before anything is computed.
GATE, UP, DOWN, ROUTER = (
    f"blk.1.{name}.weight"
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp")
)


def lying(tensors, keys, more_tensors=lambda name, tensor: ()):
    """A writer that changes those tensors, and says those values; None leaves them out."""

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def add_tensor(self, name, tensor, **more):
            found = tensors[name](tensor) if name in tensors else tensor
            if found is not None:
                super().add_tensor(name, np.ascontiguousarray(found), **more)
            for other in more_tensors(name, tensor):
                super().add_tensor(*other, **more)

        def add_key_value(self, key, val, *more, **named):
            val = keys.get(key.partition(".")[2], val)
            if val is not None:
                super().add_key_value(key, val, *more, **named)

    return Writer


@pytest.mark.parametrize(("tensors", "keys", "says"), [
    ({}, {"expert_count": 12}, r"from `blk.1.*should be \[12.*\] but is \[8"),
    ({}, {"expert_count": 4}, "2 of 4 groups of one expert leave no 3 to choose"),
    ({}, {"expert_count": 9}, "the number of experts is 9, which the number of groups 4"),
    ({}, {"expert_count": 0}, "`deepseek2.expert_count` is `0`"),
    ({}, {"expert_count": None}, "no `deepseek2.expert_count`"),
    ({}, {"expert_count": 2**31}, "`deepseek2.expert_count` is `2147483648`"),
    ({}, {"expert_used_count": 9}, "`deepseek2.expert_used_count` is `9`"),
    ({}, {"expert_used_count": 0}, "`deepseek2.expert_used_count` is `0`"),
    ({}, {"expert_group_count": 3}, "which the number of groups 3 does not divide"),
    ({}, {"expert_group_used_count": 5}, "`deepseek2.expert_group_used_count` is `5`"),
    ({}, {"expert_feed_forward_length": 64}, r"should be \[8, 64, 96\] but is \[8, 32, 96\]"),
    ({}, {"expert_shared_count": 3}, "shared.W_gate` from `blk.1.ffn_gate_shexp.weight`"),
    ({GATE: lambda _: None}, {}, f"no tensor for `blocks.1.moe.W_gate`.*{GATE}"),
    ({ROUTER: lambda _: None}, {}, f"no parameter for .*{GATE}"),
    ({UP: lambda x: x[:-1]}, {}, r"should be \[8, 32, 96\] but is \[7, 32, 96\]"),
    ({DOWN: lambda x: x.swapaxes(1, 2)}, {}, r"should be \[8, 96, 32\] but is \[8, 32, 96\]"),
    ({UP: lambda x: x.reshape(-1, 96)}, {}, r"should be \[8, 32, 96\] but is \[256, 96\]"),
    ({ROUTER: lambda x: x[:, :-1]}, {}, r"should be \[8, 96\] but is \[8, 95\]"),
])  # fmt: skip
def test_a_mixture_that_lies_is_refused_in_one_line(tensors, keys, says, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", lying(tensors, keys))
    write_gguf(build(mixed("deepseek_v3"), seed=3), tmp_path / "model.gguf", "F32")
    with pytest.raises((CheckpointError, UnsupportedModel), match=says) as caught:
        opened(tmp_path / "model.gguf")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.hint


def test_gates_in_two_tensors_are_one_too_many(tmp_path, monkeypatch):
    def both(name, tensor):
        if name == GATE:
            yield name.replace("gate", "gate_up"), np.concatenate([tensor] * 2, 1)

    monkeypatch.setattr(gguf, "GGUFWriter", lying({}, {}, both))
    write_gguf(build(mixed("qwen3_moe"), seed=3), tmp_path / "model.gguf", "F32")
    with pytest.raises(CheckpointError, match=r"both `blocks.1.moe.W_(gate|up)`"):
        opened(tmp_path / "model.gguf")


# llama.cpp gives the same log-probabilities for a small GGUF file of every architecture:
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
    """Where llama-cpp-python is installed, which CI does not do: it compiles for minutes."""
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
