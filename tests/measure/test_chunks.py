"""A prompt of several chunks: `attention`, `lens` and `dump` prove the way `generate` reads it.

Axes: T tokens, D width, N heads of queries and keys.
"""

from itertools import cycle

import pytest
import torch
from covers import in_turn
from tiny_checkpoints import write_llama, write_mistral, write_small_gpt2

import llmcli.observe.chunks as chunks
from llmcli.commands.attention.measure.run import measure_attention
from llmcli.commands.dump.measure.plan import plan_dump
from llmcli.commands.dump.measure.run import measure_dump
from llmcli.commands.lens.measure.run import Places, measure_lens
from llmcli.commands.lens.measure.stream import Stream
from llmcli.engine.session import Session
from llmcli.errors import OutOfMemory
from llmcli.kernels import native
from llmcli.loading.load import load
from llmcli.nn.block import Block
from llmcli.nn.decoder import Decoder
from llmcli.nn.step import Step, Visible
from llmcli.observe.chunks import ChunkProof, Edges, chunk_checks
from llmcli.ops import compiled
from llmcli.ops.attention import visible_keys
from llmcli.parts.attention import forward
from llmcli.parts.attention.forward import Attention
from llmcli.reports.checks import difference

IDS = (5, 17, 3, 17, 42, 8, 30, 1, 9, 11)
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0],
    "original_max_position_embeddings": 8, "factor": 4.0,
}  # fmt: skip
WRITERS = {
    "llama": write_llama,
    "mistral": write_mistral,
    "longrope": lambda path: write_llama(path, rope_scaling=LONG, max_position_embeddings=64),
    "gpt2": write_small_gpt2,
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Chunks of four tokens."""
    monkeypatch.setattr(chunks, "PROMPT_CHUNK", 4)


HAS = pytest.mark.skipif(native.level() is None, reason="there are no kernels")
ARITHMETIC = ["float32", pytest.param("packed", marks=HAS)]


def make(name, path, dtype="float32"):
    """`packed`: what rows of whole blocks there are, in 8 bits."""
    path = str(WRITERS[name](path / name))
    return load(path, quantize="int8") if dtype == "packed" else load(path, dtype=dtype)


def chunk_checks_of(model, ids):
    edges = Edges(model, len(ids))
    model.decoder(torch.tensor([ids]), tap=lambda *named: edges.watch(0, *named))
    return chunk_checks(model, ids, edges)


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(WRITERS), ["float64", *ARITHMETIC, "bfloat16", "float16"])
)
def test_every_chunk_is_what_the_formulas_make_of_it(name, dtype, tmp_path):
    model = make(name, tmp_path, dtype)
    for count in (5, 8, 9, 10):
        found = chunk_checks_of(model, IDS[:count])
        assert [check.name for check in found] == ["chunks", "chunks_stream"]
        assert all(check.ok for check in found), found
    assert chunk_checks_of(model, IDS[:4]) == (), "one chunk is what the observers see"


def test_the_lens_reads_a_prompt_as_generate_does(tmp_path, monkeypatch):
    """In the same calls, each number of the stream the same."""
    model, seen, calls, shown = make("llama", tmp_path), {}, [], {}

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
    """Some heads of a chunk are rotated by their neighbours' positions."""

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


def queries_rotated_by_another_position(fault):
    rotated(fault, "q")


def keys_rotated_by_another_position(fault):
    rotated(fault, "k")


def cached_in_another_slot(fault):
    def write(plain, own, *given):
        by = -1 if own.starts[0] else 1
        own.starts, own.keys = [own.starts[0] + by], own.keys + by
        plain(own, *given)
        own.starts, own.keys = [own.starts[0] - by], own.keys - by

    fault.wrap(Step, "write", write)


def first_key_overwritten(fault):
    """What an earlier chunk left changes before it is read: the pass itself is consistent."""

    turns = cycle((0.5, 0.0))  # keys, then values

    def write(plain, own, x, slots):
        plain(own, x, slots)
        slots[:, :, 0] += next(turns)

    fault.wrap(Step, "write", write)


def unseen(fault, visible, by):
    """Another mask; for our kernel, which has none, its first query at another position."""

    def attention(plain, own, *given):
        attend = compiled.attend

        def other(q_BHTd, k, v, starts, **rest):
            first = attend(q_BHTd[:, :, :1], k, v, (starts + by).clamp(min=0), **rest)
            return torch.cat((first, attend(q_BHTd, k, v, starts, **rest)[:, :, 1:]), 2)

        with fault.monkeypatch.context() as within:
            within.setattr(compiled, "attend", other)
            return plain(own, *given)

    fault.wrap(Step, "visible", visible)
    fault.wrap(Attention, "__call__", attention)


def first_query_sees_one_key_more(fault):
    def visible(plain, own, window):
        mask = visible_keys(own.positions, own.keys, window)
        mask[0] = visible_keys(own.positions[:1] + 1, own.keys, window)[0]
        return (Visible(slice(0, own.tokens), 0, own.keys, False, mask),)

    unseen(fault, visible, 1)


def first_query_misses_its_own_key(fault):
    def visible(plain, own, window):
        mask = visible_keys(own.positions, own.keys, window)
        mask[0, own.starts[0]] = own.starts[0] == 0  # the very first has no other
        mask[1, own.starts[0]] = False
        return (Visible(slice(0, own.tokens), 0, own.keys, False, mask),)

    unseen(fault, visible, -1 if fault.begin else 1)


def another_token(fault):
    def embed(plain, own, ids, step):
        return plain(own, ids.roll(1, 1), step)

    fault.wrap(Decoder, "_embed", embed)


def learned_positions_of_another_chunk(fault):
    plain = Step.positions.fget
    fault.monkeypatch.setattr(
        Step, "positions", property(lambda step: plain(step) + int(fault.hits(step)))
    )


FAULTS = (
    queries_rotated_by_another_position, keys_rotated_by_another_position, cached_in_another_slot,
    first_key_overwritten, first_query_sees_one_key_more, first_query_misses_its_own_key,
    another_token, learned_positions_of_another_chunk,
)  # fmt: skip


def attention(model):
    return measure_attention(model, IDS).checks


def lens(model, **options):
    places = Places()
    return measure_lens(model, IDS, span=range, places=places, **options).checks


def dump(model):
    plan = plan_dump(
        model.config, ["blocks.0.attn.z"], tokens=len(IDS), generate=0, dtype="float32",
        cache=model.decoder.arithmetic.cache,
    )  # fmt: skip
    return measure_dump(model, IDS, plan, texts=lambda ids: tuple((id, "") for id in ids)).checks


def red(checks):
    return {check.name for check in checks if not check.ok}


@pytest.mark.parametrize(
    ("fault", "begin", "dtype"), in_turn(list(FAULTS), [0, 4, 8], list(ARITHMETIC))
)
def test_a_fault_in_any_chunk_turns_every_footer_red(fault, begin, dtype, tmp_path, monkeypatch):
    learned = fault is learned_positions_of_another_chunk
    model = make("gpt2" if learned else "llama", tmp_path, dtype)
    for view in (attention, lens, dump):
        assert red(view(model)) == set(), "a sound model is green in every view"
    fault(Fault(monkeypatch, begin))
    for view in (attention, dump):
        assert {"chunks"} <= red(view(model)) <= {"chunks", "chunks_stream"}, view.__name__
    assert red(lens(model)) & {"chunks", "cache"}


@pytest.mark.parametrize(
    ("dtype", "check"), [("float32", "chunks_stream"), pytest.param("packed", "chunks", marks=HAS)]
)
@pytest.mark.parametrize("begin", [0, 4, 8])
def test_what_no_proof_of_attention_is_about_is_seen(begin, dtype, check, tmp_path, monkeypatch):
    """By comparing the passes; in blocks by proving all of a layer."""
    model = make("llama", tmp_path, dtype)

    def block(plain, own, *given):
        return plain(own, *given) * 1.001

    Fault(monkeypatch, begin).wrap(Block, "__call__", block)
    assert {check} <= red(attention(model)) <= {check, "chunks_stream"}


def test_a_prompt_whose_cache_does_not_fit_is_observed_without(tmp_path, monkeypatch):
    """But by the lens, which reads as `generate` does or not at all."""
    model = make("llama", tmp_path)
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: 0)
    assert chunk_checks_of(model, IDS) == ()
    with pytest.raises(OutOfMemory, match="the cache of 10 tokens"):
        lens(model)


def test_a_single_wrong_row_of_the_cache_is_not_allowed(tmp_path):
    model, ids = make("llama", tmp_path), list(range(9))
    state = model.decoder.new_state(1, len(ids))
    proof = ChunkProof(model, ids, state)
    for first in (0, 4, 8):
        part = torch.tensor([ids[first : first + 4]])
        model.decoder(part, state, tap=lambda *named, first=first: proof.watch(first, *named))
    assert [check.ok for check in proof.checks()] == [True]
    assert [check.ok for check in proof.checks(difference("cache", "…", ["row 3"]))] == [False]
