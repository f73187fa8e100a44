"""The decoder against itself: cached == whole, batched == alone, looked at == not looked at."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from covers import KINDS, covered
from decoder_parameters import parameters_of
from live_tensors import Live
from small_models import ids, random_decoder
from zoo import CONFIGS, MODELS, VOCAB, layer, llama, mixture, stretched

from llmcli.config.attention import Chunk, DynamicScaling
from llmcli.decoder.decoder import Decoder
from llmcli.graph.graph import graph
from llmcli.graph.precision import Precision
from llmcli.kernels import native
from llmcli.nn import step
from llmcli.ops import compiled


@pytest.fixture(params=KINDS)
def model(request):
    return random_decoder(MODELS[request.param])


@pytest.mark.parametrize("model", covered(MODELS), indirect=True)
def test_chunks_and_steps_equal_the_whole(model):
    tokens = ids(2, 13)
    whole = model(tokens)
    assert whole.shape == (2, 13, VOCAB)
    for sizes in ([1] * 13, [5, 1, 7], [12, 1]):
        state = model.new_state(2, 13)
        parts = [model(part, state, totals=[13, 13]) for part in tokens.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
        assert state.lengths == [13, 13]


def test_a_prompt_in_chunks_may_say_how_long_it_will_be():
    model = random_decoder(stretched(DynamicScaling(factor=2.0, original=6)))
    tokens = ids(2, 13)
    whole = model(tokens)
    for said in (True, False):
        state = model.new_state(2, 13)
        totals = [13, 13] if said else None
        parts = [model(part, state, totals=totals) for part in tokens.split([5, 8], 1)]
        assert torch.allclose(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10) is said


@pytest.mark.parametrize("name", KINDS)
def test_unequal_batch_equals_each_alone_in_float32(name):
    """In float64 it is in `engine/test_session`."""
    model, near = random_decoder(MODELS[name], torch.float32), {"rtol": 0, "atol": 3e-4}
    lengths, more = [9, 3, 1, 6], [1, 2, 1, 0]
    prompt, rest = ids(4, 9, 1), ids(4, 2, 2)
    state = model.new_state(4, 11)
    first = model(prompt, state, lengths=lengths, logits="last")
    second = model(rest, state, lengths=more)
    assert state.lengths == [10, 5, 2, 6]
    for b in range(4):
        alone = model.new_state(1, 12)
        one = model(prompt[b : b + 1, : lengths[b]], alone, logits="last")
        torch.testing.assert_close(first[b], one[0], **near)
        if more[b]:
            two = model(rest[b : b + 1, : more[b]], alone)
            torch.testing.assert_close(second[b, : more[b]], two[0], **near)


def test_state_forks_rewinds_and_grows(model):
    state = model.new_state(2, 6)
    model(ids(2, 5), state)
    fork = state.select([1, 1, 0])
    step = ids(3, 1, 5)
    fork.grow(9)
    assert fork.capacity == 9
    assert (state.nbytes, fork.nbytes) == (model.state_bytes(2, 6), model.state_bytes(3, 9))
    forked = model(step, fork)
    torch.testing.assert_close(forked[:1], model(step[:1].expand(2, 1), state)[1:])
    if not fork.rewinds:
        with pytest.raises(ValueError, match="cannot forget its last tokens"):
            fork.rewind([5, 5, 5])
        return
    assert fork.nbytes * 2 * 6 == state.nbytes * 3 * 9
    fork.rewind([5, 5, 5])
    again = model(step, fork)
    assert torch.equal(forked, again)
    with pytest.raises(ValueError, match="rewind"):
        fork.rewind([5, 7, 5])


def test_a_tap_changes_nothing_and_the_last_logits_and_a_blocks_output_are_those_of_all(model):
    tokens, seen = ids(2, 7), {}
    whole = model(tokens)
    assert torch.equal(model(tokens, tap=seen.__setitem__), whole)
    assert list(seen) == list(filter(graph(model.config).written, graph(model.config).nodes))
    torch.testing.assert_close(model(tokens, logits="last"), whole[:, -1:])
    for i in range(len(model.blocks)):
        assert torch.equal(model(tokens, until=i), seen[f"blocks.{i}.resid_post"])


def test_half_precision_stays_near(model):
    tokens = ids(1, 9)
    exact = model(tokens).log_softmax(-1)
    half = Decoder(model.config, Precision.of("bfloat16"), device="cpu")
    for name, slot in parameters_of(half).items():
        slot.copy_(parameters_of(model)[name])
    out = half(tokens)
    assert out.dtype == torch.float32
    assert (out.log_softmax(-1) - exact).abs().mean() < 0.2


@pytest.mark.parametrize(("rounded", "factor"), [(True, 6.9375), (False, 6.928)])
def test_the_factor_of_embeddings_is_rounded_where_the_model_was_trained_so(rounded, factor):
    config = CONFIGS["llama"]
    embedding = replace(config.embedding, scale=6.928, rounded_scale=rounded)
    model = random_decoder(replace(config, embedding=embedding), torch.bfloat16)
    seen = {}
    model(ids(1, 4), tap=seen.__setitem__)
    assert torch.equal(seen["embed"], model.embed.rows(ids(1, 4)) * factor)


def test_weights_are_freed_with_the_decoder(model):
    """At once, since the next model needs their memory: nothing in it refers back to it."""
    decoder = random_decoder(model.config)
    freed = weakref.ref(decoder)
    gc.disable()
    del decoder
    gone = freed() is None
    gc.enable()
    assert gone


def test_what_does_not_fit_is_refused(model):
    state = model.new_state(1, 4)
    model(ids(1, 3), state)
    with pytest.raises(ValueError, match="5 tokens do not fit"):
        model(ids(1, 2), state)
    with pytest.raises(ValueError, match="batch of 2"):
        model(ids(2, 1), state)
    assert state.lengths == [3]


@pytest.mark.parametrize("band", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 4, 9, Chunk(size=4)])
def test_rows_that_are_computed_some_at_a_time_see_the_same_keys(window, band, monkeypatch):
    """Under a window, whole and in chunks: as with one mask for all rows."""
    model, tokens = random_decoder(llama(*(layer(window=window),) * 2)), ids(2, 23)

    def outputs():
        state = model.new_state(2, 23)
        return [model(tokens), *(model(part, state) for part in tokens.split((11, 7, 1, 4), 1))]

    wanted = outputs()
    monkeypatch.setattr(step, "_BAND", band)
    for ours, theirs in zip(outputs(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.skipif(native.level() in (None, "portable"), reason="there are no kernels for it")
@pytest.mark.parametrize("name", ["caps", "sinks"])
def test_numbers_of_16_bits_have_kernels_for_caps_and_sinks(name, monkeypatch):
    """They are widened for it: what PyTorch has in pieces takes ten times as long."""
    decoder = random_decoder(MODELS[name], torch.bfloat16)
    ids = torch.arange(24)[None] % VOCAB
    calls, attend = [], compiled.attend

    def run():
        state = decoder.new_state(1, 32)
        parts = [decoder(part, state) for part in ids.split([9, 1, 13, 1], 1)]
        return torch.cat(parts, 1).log_softmax(-1)

    monkeypatch.setattr(
        compiled, "attend", lambda *x, **rest: (calls.append(x[0].dtype), attend(*x, **rest))[1]
    )
    found = run()
    assert calls == [torch.bfloat16] * 2 * 4
    monkeypatch.setattr(compiled, "attends", lambda *x, **rest: False)
    torch.testing.assert_close(run(), found, rtol=0.02, atol=0.02)


# what a mixture takes beside its weights does not depend on how many experts it has


def made(count, tokens, *, captured):
    """Of a step after a prompt, or of the prompt."""
    decoder = random_decoder(llama(layer(mixture(count, hidden=96))))
    decoder.fixed_shapes = captured
    state = decoder.new_state(1, 80)
    decoder.fixed_shapes = False
    if tokens == 1:
        decoder(ids(1, 9), state)
    with Live() as live:
        decoder(ids(1, tokens), state, logits="last")
    return live


@pytest.mark.parametrize(("tokens", "captured"), [(60, False), (1, False), (1, True)])
def test_the_working_memory_of_8_and_of_64_experts_is_the_same(tokens, captured):
    few, many = (made(count, tokens, captured=captured) for count in (8, 64))
    scores = tokens * (64 - 8) * 8  # bytes of a number for each expert
    assert many.largest <= few.largest + 2 * scores
    assert many.total <= few.total + 20 * scores
    one = 96 * 16 * 8  # a matrix of one expert, of which two are copied in a captured step
    assert few.largest < (3 * 2 * one if captured else 2 * tokens * 2 * 96 * 8 + one)
