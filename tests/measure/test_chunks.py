"""A prompt of several chunks has the activations of one call; `lens` proves the chunks it shows.

And new tokens are the likeliest ones, up to the end of the text, read from a cache that fits.

Axes: T tokens, D width, N heads of queries and keys.
"""

import gc
from functools import cache, partial

import pytest
import torch
from covers import covered, in_turn
from decoder_faults import red
from decoder_parameters import parameters_of
from needs import needs_kernels
from small_models import ids, random_decoder
from test_view_faults import whole
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
from llmcli.parts import attention as forward
from llmcli.parts.attention import Attention

IDS = (5, 17, 3, 17, 42, 8, 30, 1, 9, 11)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Chunks of four tokens."""
    monkeypatch.setattr("llmcli.inspect.passes.PROMPT_CHUNK", 4)


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


class Fault:
    """A fault of the chunk that begins at `begin`, wherever it is read as a chunk."""

    def __init__(self, monkeypatch, begin):
        self.monkeypatch, self.begin = monkeypatch, begin

    def hits(self, step):
        return step.tokens <= 4 and step.starts[0] == self.begin

    def wrap(self, owner, name, made):
        """`made(plain, self, …)` instead of the method, in that chunk."""
        plain = getattr(owner, name)

        def method(own, *given):
            step = own if isinstance(own, Step) else given[-1]
            return made(plain, own, *given) if self.hits(step) else plain(own, *given)

        self.monkeypatch.setattr(owner, name, method)


def rotated(fault, part):
    """Queries, or keys, of a chunk are rotated by their neighbours' positions."""

    def attention(plain, own, *given):
        rotate, heads = forward.rotate, own.config.heads

        def late(x_BTNd, cos, sin):
            right, wrong = rotate(x_BTNd, cos, sin), rotate(x_BTNd, cos.roll(1, 0), sin.roll(1, 0))
            q, k = (wrong, right) if part == "q" else (right, wrong)
            return torch.cat((q[:, :, :heads], k[:, :, heads:]), 2)

        with fault.monkeypatch.context() as within:
            within.setattr(forward, "rotate", late)
            return plain(own, *given)

    fault.wrap(Attention, "__call__", attention)


def one_key_more(own, mask, window):
    mask[0] = visible_keys(own.positions[:1] + 1, own.keys, window)[0]


def without_its_own_key(own, mask, window):
    mask[0, own.starts[0]] = own.starts[0] == 0  # the very first has no other
    mask[1, own.starts[0]] = False


def first_query(fault, sees):
    """Sees other keys; for our kernel, which has no mask, it is at another position."""
    by = 1 if sees is one_key_more or not fault.begin else -1

    def key_ranges(plain, own, window):
        mask = visible_keys(own.positions, own.keys, window)
        sees(own, mask, window)
        return (KeyRange(slice(0, own.tokens), 0, own.keys, False, mask),)

    def attention(plain, own, *given):
        attend = compiled.attend

        def other(q_BHTd, k, v, starts, **rest):
            first = attend(q_BHTd[:, :, :1], k, v, (starts + by).clamp(min=0), **rest)
            return torch.cat((first, attend(q_BHTd, k, v, starts, **rest)[:, :, 1:]), 2)

        with fault.monkeypatch.context() as within:
            within.setattr(compiled, "attend", other)
            return plain(own, *given)

    fault.wrap(Step, "key_ranges", key_ranges)
    fault.wrap(Attention, "__call__", attention)


def another_token(fault):
    fault.wrap(Decoder, "_embed", lambda plain, own, ids, step: plain(own, ids.roll(1, 1), step))


def learned_positions_of_another_chunk(fault):
    plain = Step.positions.fget
    fault.monkeypatch.setattr(
        Step, "positions", property(lambda step: plain(step) + int(fault.hits(step)))
    )


FAULTS = {
    "queries rotated by another position": ("llama", partial(rotated, part="q")),
    "keys rotated by another position": ("llama", partial(rotated, part="k")),
    "first query sees one key more": ("llama", partial(first_query, sees=one_key_more)),
    "first query misses its own key": ("llama", partial(first_query, sees=without_its_own_key)),
    "another token": ("llama", another_token),
    "learned positions of another chunk": ("gpt2", learned_positions_of_another_chunk),
}


def lens(model, tokens=IDS):
    return measure_lens(Passes(model, tokens), span=range).checks


@cache
def red_in_a_sound_model(name, dtype):
    """What is red before anything is planted: asked once of each model, for all of its faults."""
    return red(lens(whole(name, dtype)))


@pytest.mark.parametrize(
    ("fault", "begin", "dtype"), in_turn(list(FAULTS), [0, 4, 8], list(ARITHMETIC))
)
def test_a_fault_in_any_chunk_turns_the_footer_red(fault, begin, dtype, monkeypatch):
    name, plant = FAULTS[fault]
    assert red_in_a_sound_model(name, dtype) == set()
    of = whole(name, dtype)
    plant(Fault(monkeypatch, begin))
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
