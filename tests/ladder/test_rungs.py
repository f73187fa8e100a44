"""Every rung computes what the rung below computes, and what the decoder does."""

import itertools

import pytest
import torch
from covers import covered, few, in_turn
from decoder_parameters import parameters_of
from ladder_models import DENSE, TYPES, refusal
from small_models import ids, read, weights
from zoo import CONFIGS, GATED, MODELS, block, branch, llama, stretched

from llmcli.commands.ladder.measure.loops import Loops
from llmcli.commands.ladder.measure.rungs import FusedKernels, KeyValueCache, Matrices
from llmcli.commands.ladder.measure.runner import RUNGS
from llmcli.commands.ladder.measure.texts import first_attention, first_mlp, text_of
from llmcli.commands.ladder.measure.weights import AttentionWeights
from llmcli.commands.ladder.report import NAMES
from llmcli.config.attention import DynamicScaling

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
BY_NAME = dict(zip(NAMES, RUNGS, strict=True))
PROMPT, MORE = 5, 3


def attention(of, number):
    """The weights of that block's attention."""
    return next(part for part in of.blocks[number].parts if isinstance(part, AttentionWeights))


def difference(one, other):
    return (one.double() - other.double()).abs().max().item()


def run_and_compare(of, tokens, prompt):
    """Every rung against the one below and against the decoder on the whole sequence at once.

    The lower rungs read the first sequence only, those with a cache all.
    """
    whole = of.decoder(tokens)
    assert whole.abs().max() > 0.4  # numbers among which a fault could be seen
    outs = [read(kind(of), tokens if number > 5 else tokens[:1], prompt)
            for number, kind in enumerate(RUNGS, 1)]  # fmt: skip
    allowed = TOLERANCE[of.decoder.dtype]
    for out in outs:
        assert out.shape[1:] == whole.shape[1:]
        assert difference(out, whole[: len(out)]) < allowed
    for below, above in itertools.pairwise(outs):
        assert difference(below, above[: len(below)]) < allowed


@pytest.mark.parametrize(("name", "dtype"), in_turn(covered(DENSE), list(TOLERANCE)))
def test_all_rungs_agree(name, dtype):
    run_and_compare(weights(DENSE[name], dtype), ids(2, PROMPT + MORE), PROMPT)


def test_all_rungs_agree_on_one_token():
    run_and_compare(weights(CONFIGS["llama"]), ids(2, 3), 1)


@pytest.mark.parametrize("model_type", few(list(TYPES), 4))
def test_all_rungs_agree_on_every_dense_model_type(model_type):
    """By default on those that have something which no covered dense model has."""
    config = TYPES[model_type]
    run_and_compare(weights(config), ids(2, 5) % config.vocab, 3)


def test_what_is_no_dense_model_is_refused_by_the_part():
    messages = [refusal(config) for name, config in MODELS.items() if name not in DENSE]
    for noun in (
        "mixture of experts", "latent attention", "gated DeltaNet", "Mamba-2 mixer",
        "short convolution",
    ):  # fmt: skip
        assert any(noun in message for message in messages), noun
    assert all("which block " in message for message in messages)
    assert "which block 2 has" in refusal(MODELS["experts without gates, alone in their blocks"])
    alone = llama(block(branch(GATED)))
    assert refusal(alone) == "the ladder has no rungs for a model without attention"


@pytest.mark.parametrize("rung", NAMES)
@pytest.mark.parametrize("name", covered(DENSE))
def test_what_a_rung_says_is_said_of_its_model(rung, name):
    """No gate, rotation, sharing or window is spoken of where the first block has none."""
    text, config = text_of(rung, DENSE[name]), DENSE[name]
    idea = text.idea
    assert text.before != text.here
    assert len(idea.split()) > 40
    words = f"{text.before}\n{text.here}\n{idea}"
    mixer, gated = first_attention(config), first_mlp(config).gated
    shared, window = mixer.kv_heads < mixer.heads, mixer.scores.window
    spoken_of = {
        "rotat": mixer.rope is not None, "NTK": mixer.rope is not None, "gate": gated,
        "h_kv": shared, "share a key": shared, "narrower": shared,
        "window": window is not None, "√(d/h)": mixer.scores.scale == mixer.head_dim**-0.5,
    }  # fmt: skip
    for word, applies in spoken_of.items():
        assert applies or word not in words
    if rung in ("loops", "matrices") and mixer.rope is not None:
        assert "R(position)" in words
    assert ("kept rotated" in idea) is (rung in ("cache", "batch") and mixer.rope is not None)
    assert ("reads the last W" in idea) is (rung in ("cache", "batch") and window is not None)


@pytest.mark.parametrize("kind", RUNGS, ids=NAMES)
@pytest.mark.parametrize("name", ["gpt2", "layers that differ"])
def test_until_stops_after_a_layer(kind, name):
    of = weights(CONFIGS[name])
    tokens = ids(2, 5)
    prompt = tokens if kind.batched else tokens[0]
    layers = [kind(of).forward(prompt, until=i) for i in range(len(of.blocks))]
    for i, rows in enumerate(layers):
        expected = of.decoder(tokens, until=i)
        assert difference(rows, expected if kind.batched else expected[0]) < 1e-9
    assert all(difference(a, b) > 0.1 for a, b in itertools.pairwise(layers))


@pytest.mark.parametrize("kind", RUNGS[6:], ids=NAMES[6:])
def test_rows_of_a_batch_are_the_sequences_alone(kind):
    of = weights(CONFIGS["llama"])
    tokens = ids(3, 8)
    together = read(kind(of), tokens, 5)
    for row, sequence in zip(together, tokens, strict=True):
        alone = read(kind(of), sequence.unsqueeze(0), 5)[0]
        assert difference(row, alone) < 1e-12
        assert difference(row, read(KeyValueCache(of), sequence.unsqueeze(0), 5)[0]) < 1e-12
    assert difference(together[0], together[1]) > 0.1


@pytest.mark.parametrize("name", ["cache", "batch", "fused"])
def test_a_cache_outgrows_its_slots(name):
    of = weights(CONFIGS["window"])
    tokens = ids(2, 40)
    rung = BY_NAME[name](of)
    assert difference(read(rung, tokens, 3), of.decoder(tokens)) < 1e-9
    if name != "fused":
        assert rung.caches[0].keys.shape[-2] == 64


@pytest.mark.parametrize("kind", RUNGS, ids=NAMES)
def test_a_prompt_starts_anew(kind):
    of = weights(CONFIGS["gpt2"])
    rung = kind(of)
    first, second = ids(1, 6), ids(1, 4, seed=9)
    read(rung, first, 4)
    assert torch.equal(read(rung, second, 3), read(kind(of), second, 3))


def test_without_a_whole_prompt_there_is_nothing_to_extend():
    of, tokens = weights(CONFIGS["llama"]), ids(2, 4)
    for name in ("cache", "batch"):
        rung = BY_NAME[name](of)
        prompt = tokens if rung.batched else tokens[0]
        rung.start(prompt)
        rung.forward(prompt, until=0)  # a pass that stopped early
        with pytest.raises(ValueError, match="nothing to extend"):
            rung.extend(prompt[..., 0])
    with pytest.raises(ValueError, match="no prompt"):
        FusedKernels(of).extend(torch.tensor([3]))


def test_kept_keys_are_those_of_a_shorter_sequence_where_the_rotation_grows():
    """What rung 6 says of dynamic NTK: caching is no longer the same computation."""
    of = weights(stretched(DynamicScaling(factor=2.0, original=6)))
    tokens = ids(1, 10)
    again, kept, together, fused = (
        read(BY_NAME[name](of), tokens, 7) for name in ("combined", "cache", "batch", "fused")
    )
    assert difference(again[:, :7], kept[:, :7]) < 1e-9
    assert difference(again[:, 7:], kept[:, 7:]) > 1e-3
    assert difference(kept, together) < 1e-9
    assert difference(kept, fused) < 1e-9


def test_the_loops_are_float64_whatever_the_model_is():
    narrow = weights(CONFIGS["llama"], torch.float32)
    wide = weights(CONFIGS["llama"], torch.float64)
    for name, slot in parameters_of(narrow.decoder).items():
        parameters_of(wide.decoder)[name].copy_(slot)
    tokens = ids(1, 4)[0]
    out = Loops(narrow).start(tokens)
    assert out.dtype == torch.float64
    assert torch.equal(out, Loops(wide).start(tokens))
    assert Matrices(narrow).start(tokens).dtype == torch.float32


def test_one_matrix_of_our_own_from_rung_four_on():
    """Rungs 1 to 3 and 8 read the decoder's own weights, 4 to 7 concatenate theirs once."""
    of = weights(CONFIGS["llama"])
    tokens = ids(1, 4)
    rungs = [kind(of) for kind in RUNGS]
    before = [read(rung, tokens, 4) for rung in rungs]
    attention(of, 0).q.W.mul_(2)
    changed = [difference(read(r, tokens, 4), b) > 1e-3 for r, b in zip(rungs, before, strict=True)]
    assert changed == [False, True, True, False, False, False, False, True]
