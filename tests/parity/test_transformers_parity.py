"""Log-probabilities equal transformers': a tolerance of 1e-9 in float64 is a proof.

Random checkpoints of every model type and variant, read by both, over hundreds of tokens: in one
pass, in pieces through the cache, token by token, and in batches of unequal rows.
"""

import json

import pytest
import torch
from covers import covered, crossed, once
from decoder_parameters import parameters_of
from parity_models import PROMPT, ROWS, build, opened, prompt, randomize
from parity_reference import OnlyFloat64, load_reference, really_float64, reference_logprobs
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from zoo import PACKED, TYPES, ZOO, variant

from llmcli.config.experts import ExpertsConfig
from llmcli.engine.session import Session
from llmcli.families import families
from llmcli.graph.graph import graph

TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
ALL = [one.name for one in ZOO]
PLAIN = [one.name for one in ZOO if not one.history]
HISTORY = [one.name for one in ZOO if one.history]
TYPICAL = [one.name for one in ZOO if one.typical]


def difference(ours, theirs):
    """The largest difference of two tensors of log-probabilities; NaN is infinitely far."""
    assert ours.shape == theirs.shape
    return (ours.double() - theirs.double()).abs().nan_to_num(torch.inf).max().item()


def allowed(name, dtype, expected):
    """In float32 at least five times what transformers itself moves between that and float64."""
    if dtype == "float64":
        return TOLERANCE[dtype]
    return max(TOLERANCE[dtype], 5 * difference(*(expected(name, one) for one in TOLERANCE)))


def logprobs(decoder, ids, chunks=None):
    """Ours, in one pass without a state, or piece by piece through one."""
    if chunks is None:
        return decoder(ids).log_softmax(-1)
    state = decoder.new_state(ids.shape[0], ids.shape[1])
    parts = [decoder(piece, state).log_softmax(-1) for piece in ids.split(list(chunks), dim=1)]
    assert state.lengths == [ids.shape[1]] * ids.shape[0]
    return torch.cat(parts, dim=1)


def pieces(size, total=PROMPT):
    """`total` as pieces of `size`, the last one shorter."""
    return [min(size, total - start) for start in range(0, total, size)]


def test_the_watch_sees_the_casts_of_transformers(references):
    with OnlyFloat64() as watch:
        references("llama-gqa3", "float64")(prompt(tokens=9))
    assert any("softmax" in offender for offender in watch.offenders)


@pytest.mark.parametrize("name", crossed(ALL))
def test_ours_really_is_float64(name, models, references):
    """And so is the reference. What loads them is not looked at."""
    decoder = models(name, "float64").decoder
    with OnlyFloat64() as watch:
        logprobs(decoder, prompt(), [PROMPT - 1, 1])
    assert watch.seen > 30
    assert watch.offenders == []
    ids = prompt(tokens=PROMPT if variant(name).history else 70)
    reference = references(name, "float64")
    with OnlyFloat64() as watch:
        reference_logprobs(reference, ids)
    assert watch.seen > 50
    assert watch.offenders == []


PRECISIONS = [pytest.param(one, "float64") for one in ALL] + once(covered(ALL), ["float32"])


@pytest.mark.parametrize(("name", "dtype"), PRECISIONS)
def test_a_whole_prompt(name, dtype, models, expected):
    ours = logprobs(models(name, dtype).decoder, prompt())
    assert ours.dtype == getattr(torch, dtype)
    off = difference(ours, expected(name, dtype))
    assert off < TOLERANCE[dtype] or off < allowed(name, dtype, expected)


# what is dropped of files that have more: a word of every reason
DROPPED = {
    "gpt2-hub-names": "mask", "llama-hub-tensors": "computed", "llama-tied-stored": "tied",
    **dict.fromkeys(("deepseek_v2-experts", "deepseek_v3-experts", "glm4_moe_lite-experts",
                     "glm4_moe", "qwen3_5-old"), "multi-token"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_a_file_is_read_whole(name, models, references):
    """Every tensor of it, and what parity does not show: the length, and whether a head is tied."""
    model, theirs = models(name, "float64"), references(name, "float64").config
    assert bool(model.ledger.dropped) == (name in DROPPED)
    assert all(DROPPED[name] in reason for _, reason in model.ledger.dropped)
    assert not model.ledger.surplus
    another = name == "gpt_neox-tied-another"  # whose files have two
    assert model.config.head.tied == (theirs.tie_word_embeddings and not another)
    length = getattr(theirs, "seq_length", 1 << 20)  # of BLOOM; Mamba-2 has none
    assert model.config.context == getattr(theirs, "max_position_embeddings", length)


ROUTED = [
    one.name for one in ZOO
    if any(isinstance(part, ExpertsConfig) for layer in one.config().layers for part in layer.parts)
]


@pytest.mark.parametrize("name", ROUTED)
def test_rounding_turns_no_choice_of_experts(name, models):
    """Between the last chosen expert and the first refused one, and between such groups."""
    decoder, seen = models(name, "float64").decoder, dict[str, Tensor]()
    decoder(prompt(), tap=seen.__setitem__)
    parts = [(i, part) for i, layer in enumerate(decoder.config.layers) for part in layer.parts]
    routings = {i: part.routing for i, part in parts if isinstance(part, ExpertsConfig)}
    assert routings
    for i, routing in routings.items():
        moe = f"blocks.{i}.moe"
        scores = seen[f"{moe}.router_logits"]
        if routing.scores == "sigmoid" and (routing.correction or routing.groups.count > 1):
            scores = seen[f"{moe}.router_probs"]
        if routing.correction:
            scores = scores + decoder.weight(f"{moe}.b_choice").dense()
        if routing.groups.count > 1:
            groups = scores.unflatten(-1, (routing.groups.count, -1))
            best = groups.topk(routing.groups.best, -1).values.sum(-1)
            assert margin(best, routing.groups.kept) > 1e-4
            kept = best.topk(routing.groups.kept, -1).indices.unsqueeze(-1)
            scores = groups.gather(-2, kept.expand(*kept.shape[:-1], groups.shape[-1])).flatten(-2)
        assert margin(scores, routing.chosen) > 1e-4


def test_of_sigmoids_that_are_rounded_to_1_the_largest_logit_is_chosen(tmp_path):
    theirs = build(variant("llama4"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.mul_(30 if name.endswith("router.weight") else 1)
    theirs.save_pretrained(tmp_path)
    decoder, seen = opened(tmp_path, "float32").decoder, dict[str, Tensor]()
    ours = decoder(prompt(), tap=seen.__setitem__).log_softmax(-1)
    assert ((seen["blocks.1.moe.router_probs"] == 1).sum(-1) > 1).any()
    choice = graph(decoder.config).nodes["blocks.1.moe.expert_idx"].op
    assert choice.source == "blocks.1.moe.router_logits"  # which `experts` and `explain` show
    expected = reference_logprobs(load_reference(tmp_path, torch.float32), prompt())
    assert difference(ours, expected) <= 1e-4


def margin(scores, count):
    """The smallest difference of any token between the last that is chosen and the next."""
    ordered = scores.sort(-1, descending=True).values
    if count == ordered.shape[-1]:
        return torch.inf
    return float((ordered[..., count - 1] - ordered[..., count]).min())


@pytest.mark.parametrize("name", crossed(PLAIN))
def test_in_pieces_and_token_by_token(name, models, expected, expected_rows):
    """Two rows; the keys of more than a block of 256 slots are read token by token."""
    for size in (7, 64):
        ours = logprobs(models(name, "float64").decoder, ROWS[:2, :150], pieces(size, 150))
        assert difference(ours, expected_rows(name)[:2, :150]) < 1e-9
    for dtype, tolerance in TOLERANCE.items():
        ours = logprobs(models(name, dtype).decoder, prompt(), [PROMPT - 20] + [1] * 20)
        off = difference(ours, expected(name, dtype))
        assert off < tolerance or off < allowed(name, dtype, expected)


@pytest.mark.parametrize("chunks", [pieces(7, 150), pieces(64), [PROMPT - 20] + [1] * 20])
@pytest.mark.parametrize("name", HISTORY)
def test_tables_that_depend_on_the_length_follow_the_reference_piece_by_piece(
    name, chunks, models, references
):
    """A key keeps the rotation that it was cached with, in transformers as in ours."""
    ids = prompt(tokens=sum(chunks))
    ours = logprobs(models(name, "float64").decoder, ids, chunks)
    theirs = reference_logprobs(references(name, "float64"), ids, chunks)
    assert difference(ours, theirs) < 1e-9


def padded(rows):
    """Rows of ids side by side, padded on the right with a real token's id."""
    lengths = [len(row) for row in rows]
    ids = torch.full((len(rows), max(lengths)), 5)
    for into, row in zip(ids, rows, strict=True):
        into[: len(row)] = row
    return ids, lengths


@pytest.mark.parametrize("name", crossed(ALL))
def test_unequal_rows_equal_each_row_alone(name, models, references, expected_rows):
    """Three unequal prompts, each continued by unequal pieces and then token by token."""
    decoder = models(name, "float64").decoder
    # how many tokens each row gets in each call
    calls = [(PROMPT - 40, 1, 150), (5, 37, 2), (1, 1, 1), (1, 1, 1), (7, 64, 1)]
    state = decoder.new_state(3, ROWS.shape[1] + 64)  # room for padding too
    got = [[], [], []]
    done = [0, 0, 0]
    for call in calls:
        fed = [row[at : at + n] for row, at, n in zip(ROWS, done, call, strict=True)]
        ids, lengths = padded(fed)
        out = decoder(ids, state, lengths=lengths).log_softmax(-1)
        for row, n in enumerate(call):
            got[row].append(out[row, :n])
            done[row] += n
        assert state.lengths == done
    for row, total in enumerate(done):
        if variant(name).history:
            ids, chunks = ROWS[row, None, :total], [call[row] for call in calls]
            theirs = reference_logprobs(references(name, "float64"), ids, chunks)[0]
        else:
            theirs = expected_rows(name)[row, :total]
        assert difference(torch.cat(got[row]), theirs) < 1e-9


@pytest.mark.parametrize("name", [*covered(TYPICAL), "gemma4-all"])
def test_the_last_logits_of_unequal_rows(name, models, expected_rows):
    decoder = models(name, "float64").decoder
    ids, lengths = padded([row[:n] for row, n in zip(ROWS, (90, 41, 1), strict=True)])
    theirs = expected_rows(name)[range(3), [n - 1 for n in lengths]].unsqueeze(1)
    for state in (None, decoder.new_state(3, 128)):
        last = decoder(ids, state, lengths=lengths, logits="last").log_softmax(-1)
        assert last.shape == (3, 1, 211)
        assert difference(last, theirs) < 1e-9


@pytest.mark.parametrize("name", covered(TYPICAL))
def test_every_parameter_matters(name, models, expected):
    """A relative change of 1e-4 in any one parameter breaks the comparison at 1e-9.

    Of every second number: a norm of queries or keys takes a common factor out of their weights.
    """
    decoder, ids = models(name, "float64").decoder, prompt(tokens=40)
    theirs = expected(name, "float64")[:, :40]
    assert difference(logprobs(decoder, ids), theirs) < 1e-9
    unseen = []
    for parameter, tensor in parameters_of(decoder).items():
        kept = tensor.clone()
        # a bias that only chooses matters where it turns a choice
        tensor[..., ::2].mul_(-1 if parameter.endswith("b_choice") else 1 + 1e-4)
        if difference(logprobs(decoder, ids), theirs) < 1e-8:
            unseen.append(parameter)
        tensor.copy_(kept)
    invisible = [  # without a rotation a key's bias adds the same to every score of a row
        f"blocks.{i}.attn.b_k" for i, layer in enumerate(decoder.config.layers)
        if layer.attention and layer.attention.qkv_bias and layer.attention.rope is None
    ]  # fmt: skip
    if name.startswith("gemma4"):  # the final norm divides by what the last block is multiplied by
        invisible = [f"blocks.{len(decoder.blocks) - 1}.out_scale.w"]
    assert unseen == invisible


@pytest.mark.parametrize("qkv", [True, False])
@torch.no_grad()
def test_biases_of_internlm3_that_transformers_refuses(qkv, tmp_path):
    """Of q, k and v alone, or of all others alone, as in its own code: a Llama, of them zeros."""
    model = build(variant("llama-bias"))
    absent = [
        name for name in model.state_dict()
        if name.endswith(".bias") and name.endswith(tuple(f"{x}_proj.bias" for x in "qkv")) != qkv
    ]  # fmt: skip
    for name in absent:
        model.get_parameter(name).zero_()
    model.save_pretrained(tmp_path)
    theirs = reference_logprobs(load_reference(tmp_path, torch.float64), prompt())
    (settings := json.loads((tmp_path / "config.json").read_text())).update(model_type="internlm3")
    del settings["attention_bias"], settings["mlp_bias"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"qkv_bias": qkv, "bias": not qkv}))
    tensors = load_file(file := tmp_path / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in absent}, file)
    ours = opened(tmp_path, "float64")
    assert not ours.ledger.surplus
    assert difference(logprobs(ours.decoder, prompt()), theirs) < 1e-9


@torch.no_grad()
def test_a_text_that_outgrows_longropes_short_factors(references, models):
    """transformers' `generate` drops its cache there, the session reads again: 128 tokens here."""
    given = prompt(tokens=122)
    theirs = references("phi3-longrope", "float64").generate(
        given, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(given), output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    read = []
    decoder = models("phi3-longrope", "float64").decoder
    session = Session(decoder, 1, 140, on_reprefill=read.append)
    session.prefill(given.tolist())
    for id, logits in zip(theirs.sequences[0, 122:].tolist(), theirs.logits, strict=True):
        assert session.logits_BV is not None
        found, right = session.logits_BV.log_softmax(-1), logits.log_softmax(-1)
        assert difference(found, right) < 1e-6  # it gives float32
        session.extend([[id]])
    assert read == [128]


def test_the_cases_cover_what_the_parity_promises():
    """Every model type, every rotary kind, every stored dtype, shards: none fell off the list."""
    kinds = {
        one.overrides["rope_parameters"]["rope_type"]
        for one in ZOO
        if "rope_type" in one.overrides.get("rope_parameters", {})
    }
    assert kinds == {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}
    types = {name for family in families() for name in family.hf_types}
    assert {one.model_type for one in ZOO if one.typical} == TYPES.keys() == types
    assert {one.model_type for one in ZOO if one.views} == types
    written = {name for name, one in TYPES.items() if one.arch is not None}
    assert {one.model_type for one in ZOO if one.gguf} == written >= set(PACKED)
    assert {one.dtype for one in ZOO} == {torch.float32, torch.bfloat16, torch.float16}
    assert len(ALL) == len(set(ALL))


# The text model inside of a multimodal checkpoint of transformers.
_TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    patch_size=4)
_IMAGES = _TOWER | {"image_size": 8}
_AUDIO = dict(model_type="gemma4_audio", hidden_size=16, num_hidden_layers=1,
    num_attention_heads=2, subsampling_conv_channels=[8, 4], output_proj_dims=16)
_QWEN_TOWER = dict(depth=1, hidden_size=16, embed_dim=16, intermediate_size=16, num_heads=2,
    out_hidden_size=48, patch_size=4, deepstack_visual_indexes=[])


def text(kind, of="", **changes):
    """The text model of that type, as the zoo has it or another one."""
    return TYPES[of or kind].base | {"model_type": kind} | changes


def sections(*pairs, **more):
    """Rotary positions in sections."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(pairs)}
    return {"rope_parameters": rope | more}


_THREE = sections(2, 1, 1)
_MIXED = sections(4, 2, 2, mrope_interleaved=True)
_PARTIAL = sections(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25)
# model_type: the text model, the vision tower, and other settings
CASES = {
    "gemma3": (text("gemma3_text"), _IMAGES | {"model_type": "siglip_vision_model"},
               {"mm_tokens_per_image": 4}),
    "gemma4": (text("gemma4_text", use_bidirectional_attention="vision"),
               _TOWER | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
               {"audio_config": _AUDIO}),
    "llama4": (text("llama4_text"), _IMAGES | dict(model_type="llama4_vision_model",
               num_channels=3, vision_output_dim=16, projector_input_dim=16,
               projector_output_dim=16), {}),
    "mistral3": (text("mistral"), _IMAGES | {"model_type": "pixtral", "head_dim": 8}, {}),
    "qwen2_5_vl": (text("qwen2_5_vl_text", "qwen2", **_THREE),
                   _QWEN_TOWER | {"model_type": "qwen2_5_vl"}, {}),
    "qwen3_vl": (text("qwen3_vl_text", "qwen3", **_MIXED),
                 _QWEN_TOWER | {"model_type": "qwen3_vl"}, {}),
    "qwen3_5": (text("qwen3_5_text", **_PARTIAL),
                _QWEN_TOWER | {"model_type": "qwen3_5_vision"}, {}),
    "qwen3_5_moe": (text("qwen3_5_moe_text", **_PARTIAL),
                    _QWEN_TOWER | {"model_type": "qwen3_5_moe_vision"}, {}),
}  # fmt: skip
TEXT_IDS = torch.arange(3, 60)[None]


@torch.no_grad()
def written(kind, folder):
    """A random checkpoint in `folder`, and what transformers makes of a text: `[1, T, V]`."""
    inside, tower, more = CASES[kind]
    config = AutoConfig.for_model(kind, text_config=inside, vision_config=tower, **more)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    randomize(theirs, 0)
    theirs.save_pretrained(folder)
    theirs = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with really_float64():
        if kind == "llama4":  # whose whole model does not run without an image
            theirs = theirs.language_model
        inner = theirs.model if kind == "llama4" else theirs.model.language_model
        inner.rotary_emb = type(inner.rotary_emb)(inner.config)
        return theirs(input_ids=TEXT_IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", CASES)
def test_without_an_image_it_is_its_text_model(kind, tmp_path):
    right = written(kind, tmp_path)
    model = opened(tmp_path, "float64")
    assert any("vision tower" in reason for _, reason in model.ledger.dropped)
    assert (model.decoder(TEXT_IDS).log_softmax(-1) - right).abs().max() < 1e-9
