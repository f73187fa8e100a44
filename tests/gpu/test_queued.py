"""Tokens that come to the host a step late: nothing waits for the device, and the text is the same.

On the stand-in for a card (`card`), where all that makes the host wait is refused.
"""

from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from card import KERNELS, Card, OnCard, Refused
from covers import layers_of, one_each
from small_models import as_model, random_decoder
from tensors import drawn
from test_gate import CAPTURED, put
from zoo import MODELS

from llmcli.commands.timing.measure import run as timing_run
from llmcli.commands.timing.measure.run import Workload
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import _REALS, Sampling, _copied, choose
from llmcli.engine.session import Session
from llmcli.engine.speculation import decode
from llmcli.ops import on_card
from llmcli.records.machine import Ceilings, ReadRate

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "default": Sampling(seed=3),
    "all filters off": Sampling(top_k=0, top_p=1, min_p=0, seed=1),
    "top-p alone": Sampling(top_k=0, top_p=0.7, min_p=0, temperature=2, seed=2),
    "penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "greedy with penalties": Sampling(temperature=0, repetition_penalty=1.3),
    "penalties and top-p alone": Sampling(top_k=0, frequency_penalty=0.4, top_p=0.9, seed=5),
    "min-p alone": Sampling(top_k=0, top_p=1, seed=6),
    "many": Sampling(top_k=65, seed=7),
    "suppressed": Sampling(suppress_tokens=(3, 4), begin_suppress_tokens=(5,), seed=8),
}
# of a token, its copy to the host included: by PyTorch alone, and by our kernels
LAUNCHES = {
    "greedy": (4, 4), "default": (27, 4), "all filters off": (14, 4), "top-p alone": (24, 6),
    "penalties": (40, 5), "greedy with penalties": (18, 5), "penalties and top-p alone": (32, 7),
    "min-p alone": (16, 4), "many": (27, 6), "suppressed": (28, 5),
}  # fmt: skip
PROMPTS = [[5, 9, 2, 7], [3, 1]]


class Event:
    """Of a device that has done all at once; `waits` counts."""

    waits = 0

    def record(self):
        pass

    def synchronize(self):
        Event.waits += 1


class Counted(Card):
    """Lists what is launched: all that computes or copies."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def _check(self, func, *rest):
        super()._check(func, *rest)
        made = [one.alias_info for one in func._schema.returns]
        views = all(alias is not None and not alias.is_write for alias in made)
        if not views and "empty" not in func.name():
            self.launched.append(str(func))

    def choose(self, logits, k, numbers, *rest):
        """The kernels' result, by the operations that they are twins of."""
        few = 0 < k <= 64
        self.launched += ["best", "draw"] if few else ["score", "pick"]
        self.launched += ["sort", "weight"] * (k > 64)
        reals = dict(zip(_REALS, numbers.here.tolist(), strict=True))
        assert k == 1 or reals["temperature"] > 0
        assert k or reals["top_p"] == 1
        here = (None if x is None else x.here for x in rest)
        return tuple(map(OnCard, choose(logits.here, Sampling(top_k=k, **reals), *here)))


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    Event.waits = 0
    _copied.cache_clear()  # of a card that is there
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    with torch.inference_mode(), Counted() as card:
        yield card
    _copied.cache_clear()


def sampler_of(session, sampling, **rest):
    return Sampler(
        sampling, PROMPTS, samples=1, vocab=session.decoder.config.vocab,
        device=session.decoder.device, **({"logprobs": 2, "limit": 9} | rest),
    )  # fmt: skip


def started(decoder, capacity=12):
    session = Session(decoder, 2, capacity)
    session.prefill(PROMPTS)
    return session


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_tokens_are_those_of_a_processor(card, sampling):
    """Across two buckets, and with a sequence less from the fourth token on."""
    here = random_decoder(MODELS["llama"])
    texts = []
    for decoder in (here, put(here, card)):
        session = started(decoder)
        sampler = sampler_of(session, sampling)
        text = []
        with card.queued() if decoder is not here else nullcontext():
            for choices in decode(session, sampler, 8, None):
                text.append(choices)
                if len(text) == 4:
                    with card.waiting():  # a sequence ends but once
                        sampler.keep([0])
                        session.select([0])
                if len(text) == 8:
                    break
        texts.append((text, session.lengths))
    (mine, lengths), (theirs, queued) = texts
    assert [len(row) for row in theirs] == [len(row) for row in mine]
    for one, other in zip(chain(*mine), chain(*theirs), strict=True):
        assert other.id == one.id
        assert other.logprob == pytest.approx(one.logprob, abs=1e-9)
    assert Event.waits == 8
    assert queued == lengths == [11]  # of 8 tokens the last one is not read


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_few_launches_draw_a_token(card, name, batch, monkeypatch):
    rows = torch.stack([drawn(batch, 900, seed=seed) * 2 for seed in range(3)])
    made_of = SimpleNamespace(choose=card.choose)
    drew = []
    for device, kernels in (("cpu", KERNELS), ("cuda:0", KERNELS), ("cuda:0", lambda: made_of)):
        monkeypatch.setattr(on_card, "kernels", kernels)
        sampler = Sampler(
            SAMPLINGS[name], [[1, 2]] * batch, vocab=900, device=torch.device(device)
        )
        for logits_BV in rows.to(device):
            card.launched.clear()
            with card.queued():
                _, choices = sampler.draw(logits_BV)
            drew.append((len(card.launched), [choice.id for choice in choices()]))
    launches, ids = zip(*drew, strict=True)
    assert ids[:3] == ids[3:6] == ids[6:]
    assert (launches[5], launches[8]) == LAUNCHES[name]


def test_logits_that_kernels_take(card, monkeypatch):
    monkeypatch.setattr(on_card, "kernels", lambda: card)
    x = torch.zeros(9, 9, device="cuda:0")
    rows = x, x.bfloat16(), x.double(), x.T
    assert [*map(on_card.chooses, rows)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("sampling", "capacity", "limit"), [("default", 12, 3), ("greedy", 6, None)]
)
def test_a_token_is_read_before_it_is_known_but_the_last(card, sampling, capacity, limit):
    """Of a text that is limited, and of sequences that are full until they grow."""
    session = started(put(random_decoder(MODELS["llama"]), card), capacity=capacity)
    steps = decode(session, sampler_of(session, SAMPLINGS[sampling]), limit, None)
    read = []
    for _ in range(3):
        next(steps)
        read.append(max(session.lengths))
    assert read == [5, 6, 6]
    if limit is None:
        session.grow(8)
        next(steps)
        assert max(session.lengths) == 8


# whatever computes a step, it is captured: what may wait stands around that, and in the states
LAYERS = one_each(CAPTURED, lambda name: layers_of(MODELS[name]))


@pytest.mark.parametrize("name", [name for name in LAYERS if isinstance(name, str)])
def test_no_step_waits(card, name):
    """Nor does what stands around it; to look at a number is refused."""
    session = started(put(random_decoder(MODELS[name]), card))
    sampler = sampler_of(session, SAMPLINGS["default"])
    with card.queued():
        for _ in range(5):
            ids_B, _choices = sampler.draw(session.logits_BV)
            session.extend(ids_B[:, None])
        for look in (lambda: bool((ids_B > 0).all()), ids_B.tolist, ids_B.cpu, ids_B.nonzero):
            with pytest.raises(Refused):
                look()
    assert Event.waits == 0


class TimedEvent(Event):
    """Of a device that takes 2 ms for what was started since the event before."""

    now = 0.0

    def __init__(self, enable_timing=False):
        self.timing = enable_timing

    def record(self):
        TimedEvent.now += 2.0
        self.at = TimedEvent.now

    def elapsed_time(self, later):
        assert self.timing
        return later.at - self.at


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llama", 4), ("llama", 1), ("dynamic, within its length", 4), ("longrope", 4)],
)
def test_timing_runs_what_generate_does(card, monkeypatch, name, tokens):
    """Captured steps that wait for no token, between two events; parts of computed ones, scaled."""
    for call in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{call}", lambda device: 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.Event", TimedEvent)
    monkeypatch.setattr("llmcli.devices.require_memory", lambda *asked: None)
    run, bare, read = Workload.run, [], []

    def watched(workload, phase, clock, tap=None):
        if clock is None and tap is None and phase == "decode":
            bare.append(len(card.tapes))
            waits = lambda event: read.append(workload.session.lengths[0])  # noqa: E731
            monkeypatch.setattr(TimedEvent, "synchronize", waits)
            with card.queued(name == "llama"):  # rotations by length are made on the host
                return run(workload, phase, clock, tap)
        return run(workload, phase, clock, tap)

    def timed(device, call):
        begin = TimedEvent.now
        return call(), max(TimedEvent.now - begin - 2.0, 0.1) / 1e3  # from the first event on

    monkeypatch.setattr(Workload, "run", watched)
    monkeypatch.setattr(timing_run, "timed", timed)
    model = as_model(put(random_decoder(MODELS[name]), card))
    ceilings = Ceilings(
        device="cuda", dtype="float64", threads=1, seconds=0.0, start_s=1e-3, caches=(),
        reads=(ReadRate(nbytes=1 << 28, bytes_per_s=1e12, level="memory"),), matrices=(),
    )  # fmt: skip
    report = timing_run.measure_timing(model, PROMPTS[0], tokens, pairs=3, ceilings=ceilings)
    prefill, decode_phase = report.phases
    ahead = tokens > 1  # a token but the last is waited for when the next step was started
    assert read[0] == len(PROMPTS[0]) + ahead
    assert bare == [0] + 3 * [len(card.tapes)]  # only the run that warms up captures
    assert prefill.parts_scaled_by is None
    assert decode_phase.bare_s == pytest.approx(tokens * 2e-3 + 2e-3)  # a copy a token, and the end
    factor = decode_phase.parts_scaled_by
    if name != "llama":  # whose steps are computed
        assert factor is None
        return
    assert card.tapes
    assert factor == pytest.approx(decode_phase.bare_s / decode_phase.overhead.watched_s[0])
    assert decode_phase.seconds == pytest.approx(decode_phase.bare_s)
    parts = sum(part.seconds for part in decode_phase.parts)
    assert parts == pytest.approx(decode_phase.seconds, rel=0.02)
    assert decode_phase.pieces[-1].end == pytest.approx(parts)
    assert {part.bound for part in decode_phase.parts} <= {"kernel", "memory", None}
    assert not [check.name for check in report.checks if not check.ok]
