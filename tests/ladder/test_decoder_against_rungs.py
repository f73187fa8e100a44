"""The real decoder against the ladder: each way to use it, against the rung that spells it out."""

from types import SimpleNamespace

import pytest
import torch
from small_models import ids, read, weights
from zoo import CONFIGS

from llmcli.commands.ladder.measure.rungs.batch import Batch
from llmcli.commands.ladder.measure.rungs.cache import KeyValueCache
from llmcli.commands.ladder.measure.rungs.combined import CombinedQKV
from llmcli.commands.ladder.measure.rungs.fused import FusedKernels
from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.rungs.rows import VectorRows
from llmcli.commands.ladder.measure.trace import Silent
from llmcli.generation import Sampling, stream

SOME = ("gpt2", "llama", "window", "qk norm", "partial rotation", "layers that differ")


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-9, atol=1e-9)


@pytest.fixture(params=SOME)
def of(request):
    return weights(CONFIGS[request.param])


def test_a_padded_batch_against_the_loops_of_each_sequence(of):
    """Unequal lengths, padding on the right, then one token more of each."""
    lengths, tokens = [5, 2, 4], ids(3, 6)
    state = of.decoder.new_state(3, 8)
    prompt = of.decoder(tokens[:, :5], state, lengths=lengths)
    last = of.decoder(tokens[:, 5:], state)
    loops = Loops(of)
    for row, length in enumerate(lengths):
        sequence = torch.cat((tokens[row, :length], tokens[row, 5:]))
        expected = loops.start(sequence)
        close(prompt[row, :length], expected[:-1])
        close(last[row, 0], expected[-1])


def test_token_by_token_against_one_query_at_a_time(of):
    tokens = ids(1, 9)
    state = of.decoder.new_state(1, 9)
    steps = [of.decoder(tokens[:, i : i + 1], state)[0, 0] for i in range(9)]
    close(torch.stack(steps), VectorRows(of).start(tokens[0]))


@pytest.mark.parametrize("sizes", [[3, 1, 5], [1, 8], [7, 2]])
def test_a_prompt_in_chunks_against_matrices(of, sizes):
    """A chunk after the first has rows that see keys before it: no triangle, and the window."""
    tokens = ids(1, 9)
    state = of.decoder.new_state(1, 12)
    chunks = [of.decoder(chunk, state)[0] for chunk in tokens.split(sizes, 1)]
    close(torch.cat(chunks), Matrices(of).start(tokens[0]))


def test_the_attention_pattern_against_heads_as_a_dimension(of):
    """What `attention` will draw: rows of the pattern, in blocks, from emitted activations."""
    tokens = ids(1, 7)
    seen = []

    class Patterns(Silent):
        def __call__(self, formula, value, axes="", *, source=None, note="", token=None):
            if formula == "A = softmax(S + M)":
                seen.append(value)

    rung = HeadsAsDimension(of, Patterns())
    rung.start(tokens[0])
    taps = {}
    of.decoder(tokens, tap=taps.__setitem__)
    for i, (block, expected) in enumerate(zip(of.decoder.blocks, seen, strict=True)):
        q, k = (
            next(taps[name] for end in ("_rot", "_norm", "")
                 if (name := f"blocks.{i}.attn.{letter}{end}") in taps)
            for letter in "qk"
        )  # fmt: skip
        rows = [block.mixers[0].attention_rows(q[:, :, a:b], k, a) for a, b in ((0, 3), (3, 7))]
        close(torch.cat(rows, 2)[0], expected.reshape(-1, 7, 7))


def test_the_last_logits_against_combined(of):
    """Only the last real row goes through the head; the state is filled as with all of them."""
    tokens = ids(2, 6)
    state = of.decoder.new_state(2, 8)
    last = of.decoder(tokens, state, logits="last", lengths=[6, 3])
    rung = CombinedQKV(of)
    close(last[0, 0], rung.start(tokens[0])[-1])
    close(last[1, 0], rung.start(tokens[1, :3])[-1])
    more = ids(2, 1, seed=5)
    close(of.decoder(more, state)[1, 0], rung.start(torch.cat((tokens[1, :3], more[1])))[-1])


def test_forks_and_undone_tokens_against_the_cache(of):
    tokens, other = ids(2, 7), ids(1, 3, seed=5)[0]
    state = of.decoder.new_state(2, 7)
    of.decoder(tokens, state)
    state.rewind([4, 7])
    fork = state.select([0, 0])
    fork.grow(12)
    out = [of.decoder(id.expand(2, 1), fork)[:, 0] for id in other]
    rung = KeyValueCache(of)
    rung.start(tokens[0, :4])
    for step, id in zip(out, other, strict=True):
        expected = rung.extend(id)
        close(step, expected.expand(2, -1))


def test_the_decoders_cache_against_the_batch(of):
    """Slot by slot: rotated keys and values of every layer, prompt and later tokens."""
    tokens = ids(3, 8)
    state = of.decoder.new_state(3, 8)
    of.decoder(tokens[:, :6], state)
    of.decoder(tokens[:, 6:7], state)
    of.decoder(tokens[:, 7:8], state)
    rung = Batch(of)
    read(rung, tokens, 6)
    for cache, kept in zip(state.layers, rung.caches.values(), strict=True):
        close(cache.k, kept.keys[:, :, :8])
        close(cache.v, kept.values[:, :, :8])


def test_generation_against_the_best_token_of_the_fused_rung(of):
    """The engine batches, pads and drops finished sequences; the rung reads one at a time."""
    prompts = [[5, 9, 2, 7], [3], [8, 8, 1]]
    model = SimpleNamespace(
        config=of.config, decoder=of.decoder, tokenizer=None, eos_ids=frozenset(),
        device=of.decoder.device,
    )  # fmt: skip
    written = {}
    for token in stream(model, prompts, Sampling(temperature=0), limit=8):
        written.setdefault(token.sequence, []).append(token.id)
    for number, prompt in enumerate(prompts):
        rung = FusedKernels(of)
        best = rung.start(torch.tensor([prompt]))[:, -1].argmax(-1)
        for id in written[number]:
            assert id == best.item()
            best = rung.extend(best).argmax(-1)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.35)])
def test_fewer_digits_against_the_loops(name, dtype, allowed):
    """bfloat16 has three digits; the loops compute the same weights with sixteen."""
    of = weights(CONFIGS[name], dtype)
    tokens = ids(1, 6)
    exact = Loops(of).start(tokens[0])
    found = (of.decoder(tokens)[0].double() - exact).abs().max()
    assert found < allowed
    if dtype == torch.bfloat16:
        assert found > 1e-3
