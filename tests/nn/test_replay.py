"""A decode step that is recorded and replayed has the bits of the one that is computed."""

from collections import Counter
from functools import partial
from time import perf_counter_ns

import pytest
import torch
from covers import in_turn
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import random_model, walked
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import COMPUTED, IN_BLOCKS

from llmcli.decoder.steps import KernelRecorder
from llmcli.engine.session import Session
from llmcli.kernels import native
from llmcli.nn.step import Edit
from llmcli.ops import compiled, elements

pytestmark = needs_kernels

PROMPTS = [[3, 9, 1, 4], [7, 2]]
VECTORS = native.level() != "portable"


@pytest.fixture(params=IN_BLOCKS, scope="module")
def model(request):
    return packed_model(request.param)


def session(model, prompts=PROMPTS, *, capacity=40):
    one = Session(model.decoder, len(prompts), capacity)
    one.state.stepped = True  # a first step is never recorded
    one.prefill(prompts)
    return one


def ignored(name):
    """A clock that cannot be told of a replayed step afterwards: all are computed."""


def decoded(one, steps=6, **rest):
    found = []
    for _ in range(steps):
        one.extend(one.logits_BV.argmax(-1, keepdim=True), **rest)
        found.append(one.logits_BV)
    return torch.stack(found)


def eager(model, *args, clock=ignored):
    return decoded(session(model), *args, clock=clock)


def whether_replayed(model, prompts=PROMPTS):
    """A rotation or learned positions by PyTorch, or a head of another size, are not recorded."""
    one = session(model, prompts)
    decoded(one, 2)
    return bool(one.state.recorded)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_which_models_are_replayed(name):
    for prompts in (PROMPTS[:1], PROMPTS):
        replayed = whether_replayed(packed_model(name), prompts)
        # at the portable level PyTorch attends where heads are of no multiple of 16
        assert replayed == (name not in COMPUTED) or not (replayed or VECTORS)


def test_the_bits_are_the_same(model):
    expected, seen = eager(model), {}
    assert torch.equal(decoded(session(model)), expected)
    assert torch.equal(decoded(session(model), tap=seen.__setitem__), expected)
    assert "logits" in seen


class Narrow(TorchDispatchMode):
    """Counts PyTorch's products and attention with numbers in 16 bits."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        slow = "mm" in func.name() or "attention" in func.name() or "linear" in func.name()
        if slow and any(isinstance(x, Tensor) and x.dtype.itemsize == 2 for x in args):
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


# Models whose steps in 16 bits PyTorch has a share in, beside the latent ones.
COMPUTED_IN_16_BITS = {
    "gpt2", "chunks", "clipped projections", "short convolutions", "gated deltanet", "mamba-2",
    "embeddings for each layer", "post-norm, narrow embeddings",
}  # fmt: skip


@pytest.mark.parametrize("level", ["avx2", "portable"])
@pytest.mark.parametrize(
    ("name", "dtype"), in_turn([*IN_BLOCKS], [torch.bfloat16, torch.float16])
)
def test_16_bits_that_the_processor_lacks_are_widened(monkeypatch, level, name, dtype):
    """No product or attention by PyTorch, which is slow; and a recorded step has the same bits."""
    if level not in native.levels():
        pytest.skip(f"this processor has no {level}")
    monkeypatch.setattr(compiled, "EMULATED", compiled.IN_16_BITS)
    monkeypatch.setenv(native.VARIABLE, level)
    for cached in (native.level, native.team):
        cached.cache_clear()
    try:
        model = random_model(IN_BLOCKS[name][0], dtype)
        prompts = [PROMPTS[0] * 5, PROMPTS[1]]
        with Narrow() as narrow:
            one = session(model, prompts)
            found = decoded(one)
        assert not narrow.found
        if level == "avx2":
            latent = name.startswith("latent")
            assert bool(one.state.recorded) == (name not in COMPUTED_IN_16_BITS and not latent)
        assert torch.equal(found, decoded(session(model, prompts), clock=ignored))
    finally:
        monkeypatch.undo()
        for cached in (native.level, native.team):
            cached.cache_clear()


def test_tokens_that_are_read_ahead_have_the_bits_of_single_steps(model):
    one, two = session(model, PROMPTS[:1]), session(model, PROMPTS[:1])
    recorded = whether_replayed(model, PROMPTS[:1])
    # elsewhere keys are rounded to bfloat16 behind products of other sizes
    close = torch.equal if recorded else partial(torch.allclose, atol=0.03, rtol=0)
    for ids in ([5, 1, 8], [2, 2], [7, 3, 9], [4]):
        many = one.extend(torch.tensor([ids]), logits="all", verify=True)[0]
        single = torch.cat([two.extend(torch.tensor([[id]])) for id in ids])
        assert close(many, single)
        assert close(one.logits_BV, two.logits_BV)
    assert one.ids == two.ids
    if recorded:
        assert {tokens for tokens, _ in one.state.recorded} == {1, 2, 3}
    if one.state.rewinds:
        one.rewind(6)
        two.rewind(6)
        assert close(*(s.extend(torch.tensor([[6]])) for s in (one, two)))


def test_an_edit_is_computed(model):
    edits, found = [Edit(name="blocks.0.resid_pre", fn=lambda x, at: 2 * x)], []
    for clock in (None, ignored):
        one = session(model)
        decoded(one, 2, clock=clock)
        found.append(decoded(one, 3, edits=edits, clock=clock))
    assert torch.equal(*found)
    assert not torch.equal(found[0], eager(model, 2 + 3)[2:])


def test_more_slots_other_rows_and_a_step_back(model):
    (found, recorded), (expected, _) = (
        walked(session(model, capacity=8), clock=clock) for clock in (None, ignored)
    )
    assert all(map(torch.equal, found, expected))
    assert bool(recorded) == whether_replayed(model)


def test_a_full_state_is_refused_where_a_step_would_be_replayed(model):
    one = session(model, PROMPTS[:1], capacity=6)
    decoded(one, 2)
    with pytest.raises(ValueError, match="7 tokens do not fit a state of 6"):
        decoded(one, 1)
    assert len(one.ids[0]) == 6


def multiplied(x, y, clamp=None):
    return x * (y if clamp is None else y.clamp(-clamp.limit, clamp.limit) + clamp.offset)


@pytest.mark.parametrize("name", ["add", "gate"])
def test_what_is_not_recorded_is_found(name, model, monkeypatch):
    """Computed by PyTorch, a sum or a product would keep the numbers of the recorded step."""
    expected = decoded(session(model))
    plain = {"add": lambda x, y: x + y, "gate": multiplied}[name]
    for module in ("decoder.block", "parts.mlp"):
        monkeypatch.setattr(f"llmcli.{module}.{name}", plain, raising=False)
    monkeypatch.setattr(elements, name, plain)
    recorder = KernelRecorder(model.decoder._weights.values(), model.decoder._ropes.values())
    monkeypatch.setattr(model.decoder.steps, "recorder", recorder)
    one = session(model)
    assert torch.equal(decoded(one), expected)
    if name == "add":
        assert not one.state.recorded
        assert model.decoder.steps.recorder is None


class Marks:
    """A clock, called by an eager pass or told afterwards by a replayed one."""

    def __init__(self):
        self.names, self.times, self.late = [], [], 0

    def __call__(self, name):
        self.names.append(name)
        self.times.append(perf_counter_ns())

    def replayed(self, names, times):
        self.names += names
        self.times += times
        self.late += 1


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_a_clock_is_told_when_each_activation_was_there(name):
    """Once, also where a new model's first step turns out not to be recorded and is computed."""
    model = packed_model(name)
    clock, plain = Marks(), []
    one = session(model)
    begin = perf_counter_ns()
    found = decoded(one, 4, clock=clock)
    end = perf_counter_ns()
    assert torch.equal(found, eager(model, 4, clock=plain.append))
    assert clock.names == plain
    assert begin <= clock.times[0]
    assert clock.times == sorted(clock.times)
    assert clock.times[-1] <= end
    replayed, late, other = whether_replayed(model), Marks(), session(model)
    assert clock.late == 4 * replayed
    decoded(other, 2)  # recorded without a clock, and timed later
    decoded(other, 1, clock=late)
    assert (late.names, late.late) == (plain[: len(plain) // 4], replayed)


@pytest.mark.parametrize("name", ["gated deltanet", "mamba-2"])
def test_what_a_kernel_computes_together_is_computed_anew_behind_an_edit(name):
    """SiLU of an edited convolution, decays of edited steps; no bit changes where nothing does."""
    found = packed_model(name)
    part = "linattn" if name == "gated deltanet" else "ssm"
    leaves = ("conv", "act", "dt", "log_decay")
    conv, act, dt, decay = (f"blocks.0.{part}.{leaf}" for leaf in leaves)

    def seen(factor):
        taken = {}
        edits = [Edit(name=one, fn=lambda x, at: factor * x) for one in (conv, dt)]
        decoded(session(found), 1, tap=taken.__setitem__, edits=edits)
        return taken

    plain, same, doubled = {}, seen(1), seen(2)
    decoded(session(found), 1, tap=plain.__setitem__)
    assert all(torch.equal(plain[one], same[one]) for one in (conv, act, dt, "logits"))
    torch.testing.assert_close(same[decay], plain[decay], rtol=3e-7, atol=0)
    assert torch.equal(doubled[conv], 2 * plain[conv])
    torch.testing.assert_close(doubled[act], torch.nn.functional.silu(doubled[conv]))
    assert torch.equal(doubled[dt][..., :1], 2 * plain[dt][..., :1])
    torch.testing.assert_close(doubled[decay], 2 * same[decay])
