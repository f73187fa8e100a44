"""A decode step on a card that is not there: what is captured, replayed, and refused.

`card.Card` stands for the device. All that a CUDA graph cannot hold is refused while a step is
captured, and the replayed step is compared with that of a processor.
"""

from collections import Counter
from contextlib import contextmanager
from itertools import cycle
from math import prod
from types import SimpleNamespace

import pytest
import torch
from card import Card, Refused
from covers import KINDS, covered
from small_models import ids, random_decoder, walked
from zoo import MODELS

from llmcli.commands.selftest.measure.arithmetic import copied
from llmcli.config.attention import Chunk, first_key, most_keys
from llmcli.decoder.decoder import Decoder
from llmcli.decoder.steps import GraphRecorder, GraphStep
from llmcli.engine.session import Session
from llmcli.graph.precision import Precision
from llmcli.nn.state import State
from llmcli.nn.step import Edit, Step
from llmcli.ops.attention import attend
from llmcli.parts.mlp import GatedMlp

LENGTH_ROPES = {"dynamic", "dynamic, within its length", "longrope"}
CAPACITY, FIRST = 12, 4


@pytest.fixture
def card():
    with torch.inference_mode(), Card() as card:
        yield card


def put(decoder, card, dtype=torch.float64):
    """The same model on the card, with buckets of 4, 8 and 12 slots."""
    return card.put(copied(decoder, "cuda", dtype), FIRST)


def sessions(here, there, prompts, capacity=CAPACITY):
    """Of both decoders, after the prompts."""
    both = [Session(one, len(prompts), capacity) for one in (here, there)]
    for session in both:
        session.prefill(prompts)
    return both


def decoded(session, tokens, **rest):
    """Logits of tokens that are read one by one."""
    device = session.decoder.device
    return [session.extend(one.to(device), **rest).cpu() for one in tokens.split(1, 1)]


def same(mine, theirs, tolerance=1e-9):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", covered(MODELS))
def test_a_captured_step_is_the_ordinary_one(name, card):
    """Over two buckets and their border, of unequal sequences."""
    here = random_decoder(MODELS[name])
    there = put(here, card)
    tokens = ids(2, 7)
    ordinary, captured = sessions(here, there, [[5, 9, 2, 7], [3, 1]])
    same(decoded(captured, tokens), decoded(ordinary, tokens))
    assert captured.lengths == ordinary.lengths
    assert captured.ids == ordinary.ids
    if name in LENGTH_ROPES:
        assert there.steps.off == "the frequencies of its rotation depend on the length"
        assert not card.tapes
    else:
        assert there.steps.off is None
        assert set(captured.state.recorded) == {(1, 8), (1, 12)}
        assert len(card.tapes) == 2
        assert captured.state.lengths_B.tolist() == captured.lengths
        card.tapes[-1].forget()
        assert captured.state.recorded[1, 12].logits.isnan().all()  # none were left from before


def calls_of(card, session):
    """What a step launches."""
    session.state.recorded.clear()
    session.extend(torch.full((session.state.batch, 1), 5, device="cuda"))
    return card.calls


CAPTURED = [name for name in KINDS if name not in LENGTH_ROPES]


@pytest.mark.parametrize(("name", "batch"), [*zip(CAPTURED, cycle([3, 1]))])
def test_every_step_of_a_bucket_launches_the_same(name, batch):
    """Shapes, strides, numbers of the host and what is allocated; and nothing in float64."""
    with torch.inference_mode(), Card(float64=False) as card:
        decoder = Decoder(MODELS[name], Precision.of("bfloat16"), device="cuda")
        session = Session(card.put(decoder, CAPACITY), batch, CAPACITY)
        for _ in range(2):
            session.extend(torch.ones(batch, 1, dtype=torch.long, device="cuda"))
        first, second = calls_of(card, session), calls_of(card, session)
        assert first == second
        assert len(first) > 10


@pytest.mark.parametrize(("name", "heads"), [("caps", 4), ("sinks", 4), ("latent attention", 3)])
def test_a_step_reads_a_cache_of_16_bits_as_it_is(name, heads):
    """Only scores are wide, and of a short window nothing else is copied."""
    with torch.inference_mode(), Card(float64=False) as card:
        here = random_decoder(MODELS[name], torch.float32)
        there = card.put(copied(here, "cuda", torch.float16), 13)
        ordinary, captured = sessions(here, there, [[5, 9, 2, 7]], 13)
        tokens = ids(1, 9)
        same(decoded(captured, tokens), decoded(ordinary, tokens), 0.04)
        seen = [x for call in card.calls for x in call if isinstance(x, tuple) and 13 in x[1]]
        assert max(prod(x[1]) for x in seen if x[0] == "torch.float32") == heads * 13
        assert any("gather" in call[0] for call in card.calls) == (name != "latent attention")


@pytest.mark.parametrize("window", [1, 3, Chunk(size=3)])
def test_what_is_copied_of_a_short_window_is_what_is_seen(window):
    """At every position: from the first one, with fewer keys, to the last of the slots."""
    slots = torch.arange(13)
    step = Step([0] * 13, 1, [1] * 13, {}, device=slots.device, fixed=(slots, 13))
    (seen,) = step.key_ranges(window)
    copied = seen.of(slots.view(1, 1, 13, 1).expand(13, 2, 13, 4))
    assert copied.shape == (13, 2, most_keys(window), 4)
    for at in range(13):
        own = copied[at, 1, :, 3][seen.mask[at, 0, 0]].tolist()
        assert own == [*range(max(0, first_key(at, window)), at + 1)]


@pytest.fixture
def session(card):
    """Of a small model, after its prompt and a step."""
    session = Session(put(random_decoder(MODELS["llama"]), card), 1, CAPACITY)
    session.prefill([[1, 2]])
    session.extend(torch.tensor([[3]], device="cuda"))
    return session


def planted(monkeypatch, fault):
    """That in the feed-forward of every layer."""
    plain = GatedMlp.__call__

    def call(self, x_BTD, step):
        return plain(self, fault(x_BTD, step), step)

    monkeypatch.setattr(GatedMlp, "__call__", call)


FAULTS = {
    "item": (lambda x, step: x * float(x.abs().amax().item() > 0), "the host reads a number"),
    "truth": (lambda x, step: x if x.sum() > 0 else -x, "the host reads a number"),
    "list": (lambda x, step: x * step.positions.tolist()[0][0], "the host copies numbers"),
    "host tensor": (lambda x, step: x + torch.ones(x.shape[-1], dtype=x.dtype), "two devices"),
    "host tensor, copied": (lambda x, step: x + step.starts_B.new_tensor(step.starts), "is copied"),
    "nonzero": (lambda x, step: x * len(x.nonzero()), "depends on numbers"),
    "mask as an index": (lambda x, step: x + x[x > 0].sum(), "depends on numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, session, monkeypatch):
    change, message = FAULTS[fault]
    planted(monkeypatch, change)
    with pytest.raises(Refused, match=message):
        session.extend(torch.tensor([[3]], device="cuda"))


@pytest.mark.parametrize(
    "fault",
    [  # which no operation shows: the number is that of the moment of the capture
        lambda x, step: x + max(step.starts),
        lambda x, step: x + 0 * x.new_zeros(max(step.starts)).sum(),
    ],
    ids=["number of the host", "shape that grows"],
)
def test_what_differs_from_step_to_step_is_found(fault, session, card, monkeypatch):
    planted(monkeypatch, fault)
    session.extend(torch.tensor([[3]], device="cuda"))
    assert calls_of(card, session) != calls_of(card, session)


def test_planted_float64_is_found(monkeypatch):
    planted(monkeypatch, lambda x, step: x.double().to(x.dtype))
    with torch.inference_mode(), Card(float64=False) as card:
        decoder = Decoder(MODELS["llama"], Precision.of("float32"), device="cuda")
        session = Session(card.put(decoder, FIRST), 1, CAPACITY)
        session.extend(torch.tensor([[3, 4]], device="cuda"))
        session.extend(torch.tensor([[3]], device="cuda"))  # not captured
        with pytest.raises(Refused, match="makes float64"):
            session.extend(torch.tensor([[3]], device="cuda"))


def test_what_is_kept_from_before_the_capture_shows_in_the_numbers(session, monkeypatch):
    """A tensor that is made when the step is captured and never again."""
    made = {}

    def stale(x, step):
        return x + made.setdefault(step.tokens, step.positions.unsqueeze(-1) * 1)

    planted(monkeypatch, stale)
    got = decoded(session, ids(1, 3))
    monkeypatch.undo()
    planted(monkeypatch, lambda x, step: x + step.positions.unsqueeze(-1))
    again = Session(session.decoder, 1, CAPACITY)
    again.prefill([[1, 2]])
    right = decoded(again, torch.cat((torch.tensor([[3]]), ids(1, 3)), 1))[1:]
    assert (got[-1] - right[-1]).abs().max() > 1e-3


def pair(name, card, prompts):
    here = random_decoder(MODELS[name])
    return sessions(here, put(here, card), prompts)


@pytest.mark.parametrize("name", ["window", "mamba-2", "gated deltanet", "latent attention"])
def test_more_slots_other_rows_and_a_step_back(name, card):
    ordinary, captured = pair(name, card, [[5, 9, 2], [3, 1]])
    (mine, graphs), (theirs, _) = walked(captured), walked(ordinary)
    same(mine, theirs)
    assert graphs == 2


def test_shared_keys_behind_a_mask_are_given_to_every_head(card):
    """CUDA's fused kernels do not take both."""
    q, k, v = (torch.randn(2, heads, rows, 8) for heads, rows in ((4, 3), (2, 5), (2, 5)))
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    here, there = ([x.to(device) for x in (q, k, v, mask)] for device in ("cpu", "cuda"))
    with card.captured():
        found = attend(*there[:3], scale=0.3, mask=there[3])
    same([found.cpu()], [attend(*here[:3], scale=0.3, mask=mask)], 1e-6)
    (call,) = (call for call in card.calls if "scaled_dot_product_attention" in call[0])
    assert [x[1][1] for x in call[1:4]] == [4, 4, 4]


def test_taps_edits_and_clocks_are_computed(card):
    ordinary, captured = pair("llama", card, [[5, 9, 2]])
    seen, marks = Counter(), Counter()
    edits = [Edit(name="blocks.0.resid_pre", fn=lambda x, at: 2 * x)]
    for rest in (
        {"tap": lambda name, tensor: seen.update([name])}, {"edits": edits},
        {"clock": lambda name: marks.update([name])},
    ):  # fmt: skip
        same(decoded(captured, ids(1, 2), **rest), decoded(ordinary, ids(1, 2), **rest))
    assert not card.tapes
    assert seen["blocks.0.attn.q"] == marks["blocks.0.attn.q"] == 4


def test_logits_are_memory_of_their_own(card):
    _, captured = pair("llama", card, [[5, 9, 2]])
    kept = [captured.extend(one.to("cuda")) for one in ids(1, 4).split(1, 1)]
    before = [one.cpu() for one in kept]
    captured.extend(torch.tensor([[8]], device="cuda"))
    same([one.cpu() for one in kept], before, 0)


def test_a_recurrent_state_is_copied_to_capture_a_step_alone(card, monkeypatch):
    _, captured = pair("mamba-2", card, [[5, 9, 2]])
    copies, plain = [], State.snapshot
    monkeypatch.setattr(
        State, "snapshot",
        lambda self, *, slots=True: copies.append(slots) or plain(self, slots=slots),
    )
    decoded(captured, ids(1, 8))
    assert copies == [False] * len(card.tapes) == [False, False]


@pytest.mark.parametrize(
    ("name", "before", "graphs"), [("mamba-2", 1, set()), ("llama", 3, {(1, 8)})]
)
def test_a_capture_that_fails_is_not_tried_again_and_no_graph_is_kept(name, before, graphs, card):
    ordinary, captured = pair(name, card, [[5, 9, 2]])
    same(decoded(captured, ids(1, before)), decoded(ordinary, ids(1, before)))
    assert set(captured.state.recorded) == graphs
    tried = []

    def fails(step, undo, pool):
        step()
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    captured.decoder.steps.recorder.capture = fails
    same(decoded(captured, ids(1, 5)), decoded(ordinary, ids(1, 5)))
    assert len(tried) == 1
    assert captured.decoder.steps.off == (
        "the capture failed: operation not permitted when stream is capturing"
    )
    assert not captured.state.recorded


@pytest.mark.parametrize("name", ["mamba-2", "llama"])
def test_a_capture_without_memory_is_tried_for_other_slots_and_states(name, card, monkeypatch):
    """After a second time in which graphs and reserves are freed, those steps are computed."""
    ordinary, captured = pair(name, card, [[5], [3]])
    recorder, tried, freed, failing = captured.decoder.steps.recorder, [], [], [2, 2, 4, 8, 8]
    monkeypatch.setattr(
        "llmcli.decoder.steps.free_unreferenced", lambda: freed.append(tried[-1])
    )

    def capture(step, undo, pool):
        tried.append(max(captured.lengths))
        if tried[-1:] != failing[:1]:
            return card.capture(step, undo, pool)
        failing.pop(0)
        if len(failing) % 2:
            return SimpleNamespace(replay=without_memory), None, None
        step()
        without_memory()

    def without_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    def run(step, *args):
        replayed.append(tried[-1])
        replay(step, *args)

    recorder.capture, replay, replayed = capture, GraphStep.run, []
    monkeypatch.setattr(GraphStep, "run", run)
    same(decoded(captured, ids(2, 9)), decoded(ordinary, ids(2, 9)))
    assert (tried, freed) == ([2, 2, 4, 4, 8, 8], [2, 2, 4, 8, 8])
    assert not captured.state.recorded
    for session in (ordinary, captured):
        session.select([1, 0])
    same(decoded(captured, ids(2, 2)), decoded(ordinary, ids(2, 2)))
    assert (len(tried), set(captured.state.recorded)) == (7, {(1, 12)})
    assert replayed == [4] * 3 + [10]
    assert captured.decoder.steps.off is None
    assert captured.decoder.steps.recorder is recorder


def test_the_first_step_without_a_sequence_that_ended_is_captured(card):
    ordinary, captured = pair("llama", card, [[5, 9], [3, 1]])
    for batch, steps, graphs in ((2, 2, 1), (1, 1, 2)):
        same(decoded(captured, ids(batch, steps)), decoded(ordinary, ids(batch, steps)))
        assert len(card.tapes) == graphs
        for session in (ordinary, captured):
            session.select([0])


# ---- what is asked of CUDA for a capture, and in which order; a card itself is in `test_gpu`


@pytest.fixture
def asked(monkeypatch):
    """Calls to a CUDA that does nothing."""
    log = []

    class Stream:
        def wait_stream(self, other):
            log.append("wait")

    class Graph:
        def capture_begin(self, *, pool, capture_error_mode):
            log.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            log.append("end")

    @contextmanager
    def within(what):
        log.append("in" if isinstance(what, Stream) else str(what))
        yield

    current = Stream()
    for name, value in {
        "Stream": Stream, "CUDAGraph": Graph, "device": within, "stream": within,
        "current_stream": lambda: current, "graph_pool_handle": lambda: "pool",
        "is_current_stream_capturing": lambda: bool(log.append("asked")),
        "current_device": lambda: 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return log


def test_steps_are_warmed_up_and_undone_on_the_stream_of_the_capture(asked):
    recorder = GraphRecorder(torch.device("cuda:1"))

    def step():
        asked.append("step")
        return torch.ones(1)

    _, out, pool = recorder.capture(step, lambda: asked.append("undo"), None)
    warm = ["step", "undo"] * 2
    order = ["cuda:1", "wait", "in", *warm, "begin pool thread_local", "step", "end", "wait"]
    assert asked == order
    assert (float(out), pool) == (1, "pool")
    stream = recorder._stream
    asked.clear()
    recorder.capture(step, lambda: asked.append("undo"), "its own")
    assert asked[3:7] == ["step", "undo", "begin its own thread_local", "step"]  # one warm-up
    assert recorder._stream is stream
    asked.clear()
    assert not recorder.busy()
    assert asked == ["cuda:1", "asked"]


@pytest.mark.parametrize("first", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "failing", ["warm-up", "begin", "begun", "step", "step end", "end", "instantiate"]
)
def test_a_failed_capture_is_over_and_its_first_error_is_raised(failing, first, asked, monkeypatch):
    """If CUDA cannot `end` it, PyTorch's allocator has not left the pool."""
    cuda, places = SimpleNamespace(capturing=False, filling=False, uses=0), failing.split()

    def fails(place):
        if place in places:
            raise (first if place == places[0] else RuntimeError)(place)

    class Graph:
        def capture_begin(self, **rest):
            cuda.filling, cuda.uses = True, 1
            fails("begin")
            cuda.capturing = True
            fails("begun")

        def capture_end(self):
            assert cuda.capturing
            cuda.capturing = False
            fails("end")
            cuda.filling, cuda.uses = False, 0  # the graph releases it
            fails("instantiate")

    def leave(*pool):
        assert pool == (1, "pool")
        if not cuda.filling:
            raise RuntimeError("not currently recording to mempool_id")
        cuda.filling = False

    def release(*pool):
        assert pool == (1, "pool")
        cuda.uses -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    with pytest.raises(first, match=places[0]):
        GraphRecorder(torch.device("cuda")).capture(
            lambda: fails("step" if cuda.capturing else "warm-up"), lambda: None, None
        )
    assert cuda == SimpleNamespace(capturing=False, filling=False, uses=0)
    assert asked[-1] == "wait"  # what the warm-ups launched comes first
