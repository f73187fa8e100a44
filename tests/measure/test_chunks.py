"""A prompt of several chunks has the activations of one call; `lens` proves the chunks it shows.

And new tokens are the likeliest ones, up to the end of the text, read from a cache that fits.

Axes: T tokens, D width, N heads of queries and keys.
"""

import gc

import pytest
import torch
from covers import covered, in_turn
from decoder_faults import FAULTS as OF_DECODERS
from decoder_faults import red, rotating, wrap
from decoder_parameters import parameters_of
from needs import needs_kernels
from small_models import ids, random_decoder
from test_view_faults import red_without_a_fault, whole
from zoo import MODELS, VOCAB

from llmcli import devices
from llmcli.commands.lens.measure import Stream, measure_lens
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.errors import NotFinite, OutOfMemory
from llmcli.graph.graph import graph
from llmcli.inspect.passes import Passes
from llmcli.measure.runs import gc_disabled
from llmcli.nn.step import KeyRange, Step
from llmcli.ops import compiled
from llmcli.ops.attention import visible_keys

IDS = (5, 17, 3, 17, 42, 8, 30, 1, 9, 11)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Chunks of four tokens."""
    monkeypatch.setattr(Session, "chunk", 4)


ARITHMETIC = [torch.float32, pytest.param("packed", marks=needs_kernels)]


def apart(decoder, tokens, chunk=4):
    """Activations that a prompt in chunks has otherwise than one call."""
    count, whole, parts, found = tokens.shape[1], {}, {}, []

    def tap(name, x):
        parts.setdefault(name, []).append(x[0])

    decoder(tokens, tap=whole.__setitem__)
    session = Session(decoder, 1, count)
    for part in tokens.split(chunk, 1):
        session.extend(part, logits="all", totals=[count], tap=tap)
    assert parts.keys() == whole.keys()
    for name, pieces in parts.items():
        together = torch.cat(pieces, graph(decoder.config)[name].axes.index("T"))
        if not torch.allclose(together, whole[name][0], rtol=1e-10, atol=1e-10):
            found.append(name)
    return found


@pytest.mark.parametrize("name", covered(MODELS))
def test_activations_of_a_prompt_in_chunks_are_those_of_one_call(name):
    decoder = random_decoder(MODELS[name])
    assert [apart(decoder, ids(1, 11), chunk) for chunk in (4, 1)] == [[], []]


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_turn(
        ["llama", "window", "longrope", "gpt2"],
        [torch.float64, *ARITHMETIC, torch.bfloat16, torch.float16],
    ),
)
def test_every_chunk_is_what_the_formulas_make_of_it(name, dtype):
    of = whole(name, dtype)
    for count in (5, 8, 9, 10):
        (check,) = [one for one in lens(of, IDS[:count]) if one.name == "chunks"]
        assert check.ok, check
    assert "chunks" not in {check.name for check in lens(of, IDS[:4])}


def test_the_lens_reads_a_prompt_as_generate_does(monkeypatch):
    """In the same calls, each number of the stream the same."""
    model, seen, calls, shown = whole("llama", torch.float32), {}, [], {}

    def tap(name, tensor):
        seen.setdefault(name, []).append(tensor)

    Session(model.decoder, 1, len(IDS)).prefill([IDS], chunk=4, tap=tap)
    call, rows = Decoder.__call__, Stream.rows
    monkeypatch.setattr(
        Decoder,
        "__call__",
        lambda self, ids, *a, **o: calls.append(ids) or call(self, ids, *a, **o),
    )

    def kept(self, positions):
        shown.update(zip(self.names, rows(self, positions), strict=True))
        return rows(self, positions)

    monkeypatch.setattr(Stream, "rows", kept)
    lens(model)
    assert [ids.shape[1] for ids in calls] == [4, 4, 2]
    assert shown
    for name, rows_TD in shown.items():
        assert torch.equal(rows_TD, torch.cat(seen[name], 1)[0]), name


def in_a_chunk(patch, begin, plant, of):
    """Plants a fault for the call alone that reads the chunk from `begin` on."""
    call = Decoder.__call__

    def chunk(decoder, ids, state, **rest):
        with patch.context() as within:
            if state.lengths[0] == begin:
                plant(within, of)
            return call(decoder, ids, state, **rest)

    patch.setattr(Decoder, "__call__", chunk)


def rotated(part):
    """Queries, or keys, are rotated by their neighbours' positions."""
    heads = MODELS["llama"].layers[0].attention.heads

    def late(rotate, x_BTNd, cos, sin):
        right, wrong = rotate(x_BTNd, cos, sin), rotate(x_BTNd, cos.roll(1, 0), sin.roll(1, 0))
        q, k = (wrong, right) if part == "q" else (right, wrong)
        return torch.cat((q[:, :, :heads], k[:, :, heads:]), 2)

    return rotating(late)


def first_query(more):
    """Sees a key more, or not its own; for our kernel without a mask it is at another position."""

    def key_ranges(plain, step, window):
        mask, first = visible_keys(step.positions, step.keys, window), step.starts[0]
        if more:
            mask[0] = visible_keys(step.positions[:1] + 1, step.keys, window)[0]
        else:
            mask[0, first] = first == 0  # the very first has no other
            mask[1, first] = False
        return (KeyRange(slice(0, step.tokens), 0, step.keys, False, mask),)

    def attend(plain, q_BHTd, k, v, starts, **rest):
        moved = (starts + (1 if more or not starts[0] else -1)).clamp(min=0)
        first = plain(q_BHTd[:, :, :1], k, v, moved, **rest)
        return torch.cat((first, plain(q_BHTd, k, v, starts, **rest)[:, :, 1:]), 2)

    def plant(patch, of):
        wrap(Step, "key_ranges", key_ranges)(patch, of)
        wrap(compiled, "attend", attend)(patch, of)

    return plant


FAULTS = {
    "queries rotated by another position": ("llama", rotated("q")),
    "keys rotated by another position": ("llama", rotated("k")),
    "first query sees one key more": ("llama", first_query(more=True)),
    "first query misses its own key": ("llama", first_query(more=False)),
    "another token": ("llama", wrap(
        Decoder, "_embed", lambda embed, self, ids, step: embed(self, ids.roll(1, 1), step))),
    "learned positions of another chunk": OF_DECODERS["learned positions from one"],
}  # fmt: skip


def lens(model, tokens=IDS):
    return measure_lens(Passes(model, tokens), span=range).checks


@pytest.mark.parametrize(
    ("fault", "begin", "dtype"), in_turn(list(FAULTS), [0, 4, 8], list(ARITHMETIC))
)
def test_a_fault_in_any_chunk_turns_the_footer_red(fault, begin, dtype, monkeypatch):
    name, plant = FAULTS[fault]
    assert not red_without_a_fault(lens, whole, name, dtype)
    of = whole(name, dtype)
    in_a_chunk(monkeypatch, begin, plant, of)
    assert "chunks" in red(lens(of))


def test_new_tokens_that_change_the_frequencies_have_another_cache():
    found = Passes(whole("longrope", torch.float64), IDS[:2], 5)
    found.write()
    assert [check.ok for check in found.checks] == [True]


# new tokens

PROMPT = tuple((5 * i + 1) % VOCAB for i in range(9))


@pytest.fixture
def model():
    return whole("llama", torch.float64)


def generated(model, ids, limit, **options):
    passes = Passes(model, ids, limit)
    passes.write(**options)
    return passes


def test_logits_that_are_not_finite(model):
    parameters_of(model.decoder)["ln_final.w"].fill_(float("nan"))
    with pytest.raises(NotFinite):
        generated(model, PROMPT, 1)


@pytest.mark.parametrize("prove", [False, True])
def test_every_new_token_is_the_likeliest(model, prove):
    found = generated(model, PROMPT, 4, prove=prove)
    ids = list(PROMPT)
    for _ in range(4):
        ids.append(int(model.decoder(torch.tensor([ids]))[0, -1].argmax()))
    assert list(found.ids) == ids
    assert [check.name for check in found.checks] == ["steps"] * prove
    none = generated(model, PROMPT, 0)
    assert (none.ids, none.checks) == (PROMPT, ())


def test_an_end_of_text_token_is_the_last_and_is_read(model):
    whole = generated(model, PROMPT, 4).ids
    model.eos_ids = frozenset({whole[10]})
    found = generated(model, PROMPT, 4)
    assert found.ids == whole[: whole.index(whole[10], 9) + 1]
    assert [check.ok for check in found.checks] == [True]


def test_a_cache_that_does_not_fit_is_refused(model, monkeypatch):
    needed = model.decoder.state_bytes(1, 13)
    monkeypatch.setattr(devices, "available_bytes", lambda device: needed)
    generated(model, PROMPT, 4)
    monkeypatch.setattr(devices, "available_bytes", lambda device: needed - 1)
    with pytest.raises(OutOfMemory, match="the cache of 13 tokens"):
        generated(model, PROMPT, 4)


def test_the_collector_is_off_within_and_as_it_was_afterwards():
    with gc_disabled(), gc_disabled():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), gc_disabled():
            1 / 0  # noqa: B018
        assert not gc.isenabled()
    finally:
        gc.enable()
