"""`measure_timing` on models of every kind: it adds up, and each of its checks can fail."""

import gc
from io import StringIO
from itertools import product
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from blocks import ffn_of
from covers import covered
from decoder_faults import red
from decoder_parameters import packed_model, parameters_of
from needs import needs_kernels
from rich.console import Console
from small_models import as_model, ids
from timed_models import CEILINGS, PROMPT, FakeDevice, small, timed, undisturbed
from zoo import CONFIGS

from llmcli.commands.timing.measure import clock as clock_module
from llmcli.commands.timing.measure import run as timing_run
from llmcli.commands.timing.measure.clock import EventClock, HostClock, OperationCount, in_order
from llmcli.commands.timing.measure.run import Workload, measure_timing, memory_check
from llmcli.commands.timing.report import Stage
from llmcli.commands.timing.view import render_timing
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.errors import NotFinite, OutOfMemory
from llmcli.graph.graph import graph
from llmcli.loading.load import load
from llmcli.measure import runs as measured_runs
from llmcli.nn.step import Step
from llmcli.weights.dense import writable

DELAY_S = 0.005
MIB = 1 << 20
PRODUCTS = {"qkv", "out", "ffn_up", "ffn_down", "head"}


@pytest.mark.parametrize("name", covered(CONFIGS))
def test_all_is_accounted_for_in_every_kind_of_model(name):
    report = timed(small(name))
    assert red(report.checks) <= {"adds_up"}  # a run of 1 ms can be interrupted; see the next test
    for phase in report.phases:
        assert phase.gaps_s == phase.totals[-1].seconds
        assert sum(part.seconds for part in phase.parts) == pytest.approx(
            sum(part.seconds for part in phase.totals)
        )
        work = sum((part.work for part in phase.parts), start=type(phase.work)())
        assert work == sum((part.work for part in phase.totals), start=type(work)()) == phase.work
        order = in_order(graph(CONFIGS[name]))
        assert [part.part for part in phase.totals] == sorted(
            (part.part for part in phase.totals), key=order.index
        )
        assert {part.layer for part in phase.parts} == {None, *range(len(CONFIGS[name].layers))}
        assert all(part.host_s == part.seconds for part in phase.parts)  # the host computes


def test_the_time_adds_up():
    """Of several tries one that was not interrupted: the check itself is about 2 %."""
    assert undisturbed(small("llama"), ids(1, 40)[0].tolist(), new_tokens=20, pairs=5)


def test_phases_say_what_they_ran():
    model = small("llama")
    report = timed(model, new_tokens=4, pairs=4)
    prefill, decode = report.phases
    assert (prefill.name, prefill.tokens, prefill.past, prefill.calls) == ("prefill", 9, 0, 1)
    assert (decode.name, decode.tokens, decode.past, decode.calls) == ("decode", 4, 9, 4)
    assert "sample" not in {part.part for part in prefill.totals}
    assert next(p for p in decode.totals if p.part == "sample").calls == 4
    assert next(p for p in decode.totals if p.part == "ffn_down").calls == 8  # 2 layers, 4 tokens
    assert (decode.work.gemv, decode.work.gemm) == (4 * (2 * 4 + 1), 0)  # one row is a GEMV
    # of a prompt that is one call the head alone has one row; then all products are of a vector
    for phase, vectors in ((prefill, {"head"}), (decode, PRODUCTS)):
        seconds = sum(part.seconds for part in phase.totals if part.part in vectors)
        assert phase.gemv_s == pytest.approx(seconds)
    assert (decode.gemm_s, decode.gemv_s > 0, prefill.gemv_s > 0) == (0.0, True, True)
    assert report.working_set < report.weight_bytes + 10_000
    assert not report.interrupted
    # weights that sit in a cache are not held against memory
    assert report.working_set < report.ceilings.caches[0].bytes
    bounds = {part.bound for phase in report.phases for part in (*phase.parts, *phase.totals)}
    assert bounds <= {"L2", "compute", "calls", "kernel", None}
    assert {part.part for part in decode.totals if part.bound is None} == {"sample", "gaps"}
    nearest = {part.nearest for phase in report.phases for part in phase.totals}
    assert "L2" in nearest <= {"L2", "compute", None}
    # with an even number of pairs the lower of the two in the middle is the median
    for phase in report.phases:
        looked = phase.overhead
        assert len(looked.watched_s) == len(looked.bare_s) == 4
        assert looked.lowest <= looked.median <= looked.highest
        assert phase.seconds == sorted(looked.watched_s)[1]
        assert phase.bare_s == sorted(looked.bare_s)[1]
        (alone,) = timed(model, phases=(phase.name,)).phases
        assert alone.name == phase.name


def test_the_peak_is_that_of_stages_and_phases_and_the_working_set_grows_with_keys():
    model = small("llama")
    report = timed(model)
    peaks = [phase.peak for phase in report.phases if phase.peak is not None]
    assert report.peak == max(peaks, default=None)  # the system may keep no mark
    stages = (Stage(name="load the weights", seconds=1.0, peak=2**50),)
    report = measure_timing(
        model, [1, 2], 1, pairs=1, ceilings=CEILINGS, stages=stages, base=7,
    )  # fmt: skip
    assert (report.peak, report.base, report.stages) == (stages[0].peak, 7, stages)
    layer = model.config.layers[0].attention
    key = 2 * layer.kv_heads * (layer.head_dim + layer.value_dim) * 4  # of both layers, float32
    long, short = (Workload(model, [1] * n, 0).working_set for n in (30, 10))
    assert long - short == 20 * key


def test_layers_on_several_devices_have_no_lower_bounds():
    """But those on the device whose ceilings were measured, and what is outside of the layers."""
    here = small("llama").decoder
    placed = [torch.device("cpu:0"), here.device]  # another device by its name
    model = as_model(Decoder(here.config, here.precision, device=here.device, placed=placed))
    with torch.no_grad():
        for name in here.weight_names:
            writable(model.decoder.weight(name)).copy_(writable(here.weight(name)))
    report = timed(model)
    for phase in report.phases:
        assert {part.of_bound for part in phase.totals} == {None}
        assert {part.layer for part in phase.parts if part.of_bound} == {None, 1}
    one = "no lower bounds: layers are on several devices"
    one += ", ceilings and peak memory are of cpu alone\n"
    for details, other in product((False, True), (report, timed(small("llama")))):
        console = Console(width=100, file=StringIO())
        console.print(render_timing(other, details=details))
        several = other is report
        assert console.file.getvalue().count(one) == several
        assert ("a step's" in console.file.getvalue()) == (details and not several)


def test_a_prompt_whose_continuation_changes_its_rotations():
    """Each run reads it again: LongRoPE has other frequencies from the fifth token on."""
    report = timed(small("longrope"), PROMPT[:4], 2, pairs=2)
    assert red(report.checks) <= {"adds_up"}


@needs_kernels
def test_steps_that_a_cpu_records_are_timed_part_by_part():
    workload = Workload(packed_model("llama"), [1, 2], 2)
    workload.ready("decode")
    workload.run("decode", None)
    assert workload.session.state.recorded
    assert not workload.captured


def test_a_prompt_of_one_token_more_than_a_chunk_is_two_calls(monkeypatch):
    """65 tokens: 64 are read by GEMMs and the last one by GEMVs."""
    monkeypatch.setattr(Session, "chunk", 64)
    prompt, model = ids(1, 65)[0].tolist(), small("window")
    report = timed(model, prompt, new_tokens=0, phases=("prefill",))
    (prefill,) = report.phases
    assert not red(report.checks) - {"adds_up"}
    assert prefill.calls == 2
    assert {piece.call for piece in prefill.pieces} == {0, 1}
    calls = {part.part: part.calls for part in prefill.totals}
    assert (calls["embed"], calls["head"]) == (2, 1)  # only the end of a prompt says what is next
    layers = 2 * len(model.config.layers)
    assert {calls[part] for part in ("qkv", "attention", "out", "ffn_down")} == {layers}
    products = [piece for piece in prefill.pieces if piece.part in PRODUCTS]
    many = sum(piece.seconds for piece in products if piece.call == 0)
    one = sum(piece.seconds for piece in products if piece.call == 1)
    assert one > 0
    assert (prefill.gemm_s, prefill.gemv_s) == (pytest.approx(many), pytest.approx(one))
    assert {piece.call for piece in products if piece.part == "head"} == {1}


@pytest.fixture
def calls(monkeypatch):
    """Of each call `seen` its clock and whether garbage is collected; call `at` is interrupted."""
    calls, emit = SimpleNamespace(seen=[], at=None), Step.emit

    def watched(step, name, x):
        if name == "embed":
            calls.seen.append((type(step.clock), gc.isenabled()))
            if len(calls.seen) == calls.at:
                raise KeyboardInterrupt
        return emit(step, name, x)

    monkeypatch.setattr(Step, "emit", watched)
    return calls


def test_pairs_begin_with_either_run_in_turns_and_the_collector_is_off(calls):
    told = []
    timed(small("llama"), phases=("prefill",), pairs=3, progress=lambda _, *at: told.append(at))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]
    bare, clocked = (type(None), False), (HostClock, False)
    warm = [bare, clocked, (OperationCount, False)]
    assert calls.seen == [*warm, bare, clocked, clocked, bare, bare, clocked]
    assert gc.isenabled()


@pytest.fixture
def ticks(monkeypatch):
    """`ticks(call)` delays a call by a clock that only delays turn, and a look at it by 1 µs."""
    now = [0]

    def ns():
        now[0] += 1000
        return now[0]

    def delayed(call):
        def slow(*args):
            now[0] += int(DELAY_S * 1e9)
            return call(*args)

        return slow

    monkeypatch.setattr(clock_module, "perf_counter_ns", ns)
    for module in (timing_run, measured_runs):
        monkeypatch.setattr(module, "perf_counter", lambda: ns() / 1e9)
    return delayed


@pytest.mark.parametrize(("name", "layer", "attribute", "part"), [
    ("llama", 1, "gate_up", "ffn_up"), ("llama", 0, "down", "ffn_down"),
    ("llama", 1, "act", "ffn_act"), ("llama", 1, "out", "out"), ("gpt2", 1, "up", "ffn_up"),
    ("gpt2", 0, "act", "ffn_act"), ("gpt2", 1, "down", "ffn_down"),
])  # fmt: skip
def test_a_delay_in_one_layer_is_found_there_and_nowhere_else(
    name, layer, attribute, part, monkeypatch, ticks
):
    model = small(name)
    ffn, mixer = ffn_of(model.decoder.blocks[layer]), model.decoder.blocks[layer].mixers[0]
    if attribute in ("down", "out"):
        ffn, attribute = {"down": ffn.down, "out": mixer.out}[attribute], "wide"
    slow = ticks(getattr(ffn, attribute))
    if attribute == "gate_up":
        slow = type("Slow", (), {"__call__": lambda _, x, call=slow: call(x),
                                 "split": ffn.gate_up.split})()  # fmt: skip
    monkeypatch.setattr(ffn, attribute, slow)
    report = timed(model, new_tokens=4, pairs=3)
    assert [place for phase in report.phases for place in misplaced(phase, part, layer)] == []
    assert red(report.checks) == set()


def misplaced(phase, part, layer):
    """Where the delay is missing, and where half of it is that should not be there."""
    found = {(p.part, p.layer): p.seconds / phase.calls for p in phase.parts}
    if found.pop((part, layer)) < DELAY_S:
        yield "missing", phase.name
    yield from (place for place, seconds in found.items() if seconds >= DELAY_S / 2)


# -- what turns the footer red


def test_a_clock_that_loses_time_does_not_add_up(monkeypatch):
    class Forgetful(HostClock):  # where tokens are written
        def marks(self, *wall_s):
            marks = super().marks(*wall_s)
            for i, name in enumerate(marks.names if timing_run.SAMPLE in marks.names else ()):
                marks.seconds[i] *= 0.5 if name.startswith("blocks.") else 1.0
            return marks

    monkeypatch.setattr(timing_run, "clock_for", lambda device: Forgetful())
    for phases, where in (("prefill", "decode"), "decode"), (("decode",), ""):
        (wrong,) = (check for check in timed(small("llama"), phases=phases).checks if not check.ok)
        assert (wrong.name, wrong.where) == ("adds_up", where)


def silent(emit, self, name, tensor, at):
    return tensor if name == at else emit(self, name, tensor)


def meddling(emit, self, name, tensor, at):
    if self.clock is not None and name == at:
        tensor.mul_(1 + 1e-6)
    return emit(self, name, tensor)


@pytest.mark.parametrize(("fault", "at", "checks"), [
    (silent, "blocks.1.resid_mid", {"marks": "blocks.1.resid_mid (prefill)"}),
    (silent, "blocks.1.attn_out", {"marks": "", "flops": ""}),  # work that is never timed
    (meddling, "blocks.0.resid_mid", {"same": ""}),
])
def test_an_activation_without_its_mark_and_a_clock_that_meddles(fault, at, checks, monkeypatch):
    emit = Step.emit
    monkeypatch.setattr(Step, "emit", lambda *args: fault(emit, *args, at))
    failed = {check.name: check for check in timed(small("llama")).checks if not check.ok}
    assert failed.keys() - {"adds_up"} == checks.keys()
    for name, where in checks.items():
        assert where in failed[name].where
        assert failed[name].value > 0


def test_logits_that_are_nan_and_a_cache_that_does_not_fit_are_refused(monkeypatch):
    model = small("llama")
    parameters_of(model.decoder)["ln_final.w"].fill_(torch.nan)
    for phase in ("prefill", "decode"):
        with pytest.raises(NotFinite):
            timed(model, phases=(phase,))
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: 1000)
    with pytest.raises(OutOfMemory, match="the cache of 1 × 12 tokens"):
        timed(model)


# -- a device that works behind the host


def test_the_devices_time_is_told_from_the_hosts(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(timing_run, "clock_for", lambda _: EventClock(device.event, device.wait))
    report = timed(small("llama"), new_tokens=2, pairs=2)
    assert device.waits == 2 * (1 + 2)  # a watched run each, to warm up and then in pairs
    decode = report.phases[1]
    marked = {"norm": 5, "qkv": 6, "rope": 4, "residual": 4, "head": 2}
    for part in decode.totals:
        if part.part in marked:
            assert part.seconds == pytest.approx(2 * marked[part.part] * 20.0)
            assert 0 < part.host_s < part.seconds
    assert decode.gaps_s == pytest.approx(20.0 * (2 * 2 + 1))  # step, resid_pre, and the end
    assert "adds_up" in red(report.checks)  # this device's time is not the wall's


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_it_adds_up():
    model = load("tiny", device="cuda")
    for phase in undisturbed(model, new_tokens=16, pairs=5).phases:
        assert all(part.host_s != part.seconds for part in phase.parts)
        assert phase.peak is not None
        assert phase.peak > model.weight_bytes


# -- memory


@pytest.mark.parametrize(("base", "taken", "estimated", "ok"), [
    (300, 1000, 1000, True), (300, 1115, 1000, True), (300, 1117, 1000, False),
    (300, 885, 1000, True), (300, 883, 1000, False),
    # of a small model 16 MiB may be more
    (0, 17, 1, True), (0, 18, 1, False),
])  # fmt: skip
def test_what_was_held_is_compared_with_the_estimate(base, taken, estimated, ok):
    (check,) = memory_check(base * MIB, (base + taken) * MIB, estimated * MIB)
    assert (check.name, check.ok) == ("memory", ok)


def test_what_is_not_known_is_not_judged():
    assert memory_check(None, 1, 1) == memory_check(1, None, 1) == ()
    model = small("llama")
    assert "memory" not in {check.name for check in timed(model).checks}
    assert "memory" in red(timed(model, base=-(10**12)).checks)
    decode = timed(model, base=-(10**12), phases=("decode",))
    assert "memory" not in {check.name for check in decode.checks}


# -- cut short


def test_what_was_whole_before_an_interrupt_is_reported(calls):
    """Three runs to warm up, then two a pair: in the third pair, before and in the first one."""
    for at, pairs, whole in ((9, 9, [2]), (8, 2, [2]), (1, 9, []), (5, 9, [])):
        calls.seen, calls.at = [], at
        report = timed(small("llama"), pairs=pairs)
        assert report.interrupted
        assert [len(phase.overhead.ratios) for phase in report.phases] == whole
        assert report.estimated > 0
        for phase in report.phases:
            assert (phase.name, phase.seconds) == ("prefill", min(phase.overhead.watched_s))
        checks = {"adds_up", "marks", "flops", "same"} if whole else set()
        assert {check.name for check in report.checks} == checks
        assert red(report.checks) <= {"adds_up"}


@pytest.mark.parametrize("step", ["part_times", "timing_checks"])
def test_an_interrupt_while_the_times_are_added_up_loses_none(monkeypatch, step):
    once = Mock(wraps=getattr(timing_run, step), side_effect=[KeyboardInterrupt, *2 * [DEFAULT]])
    monkeypatch.setattr(timing_run, step, once)
    report = timed(small("llama"), pairs=2)
    assert report.interrupted
    assert [len(phase.overhead.ratios) for phase in report.phases] == [2, 2]


def test_bytes_of_experts_are_those_that_ran():
    """Of each call and layer, and counted by hand from the choices."""
    model, new = small("experts by groups"), 3
    report = timed(model, new_tokens=new)
    chosen: dict[str, list[int]] = {}

    def tap(name, tensor):
        if name.endswith("expert_idx"):
            chosen.setdefault(name, []).append(len(tensor.unique()))

    session = Session(model.decoder, 1, len(PROMPT) + new)
    session.extend([list(PROMPT)], tap=tap)
    prompt = {name: counts.pop() for name, counts in chosen.items()}
    each = 3 * 4 * 16 * 12  # gate, up and down of one expert in float32
    prefill, decode = report.phases
    for phase, ran in ((prefill, prompt), (decode, dict.fromkeys(prompt, 3 * new))):
        for layer in (0, 1):
            part = next(p for p in phase.parts if (p.part, p.layer) == ("experts", layer))
            assert part.work.weights == ran[f"blocks.{layer}.moe.expert_idx"] * each
    assert {p.part for p in prefill.totals} >= {"router", "experts", "shared"}


# -- a trained model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_of_it(smollm2_path, dtype):
    """SmolLM2 on a CPU: the time adds up, little of it is in gaps; a token takes 121 GEMVs."""
    torch.set_num_threads(1)
    model = load(str(smollm2_path), device="cpu", dtype=dtype)

    def quiet(report):
        assert not red(report.checks) - {"adds_up"}
        gaps = all(one.gaps_s <= 0.05 * one.seconds for one in report.phases)
        return not red(report.checks) and gaps

    report = undisturbed(model, range(100, 120), new_tokens=3, pairs=2, good=quiet)
    assert report.working_set < report.weight_bytes * 1.01  # the table is the head's, read whole
    for phase in report.phases:
        assert phase.peak is None or phase.peak > model.weight_bytes
    prefill, decode = report.phases
    assert (decode.work.gemv, decode.work.gemm) == (3 * 121, 0)
    assert (prefill.work.gemv, prefill.work.gemm) == (1, 120)
    assert decode.gemv_s > 0.5 * decode.seconds
    assert decode.gemm_s == 0
    assert prefill.gemm_s > prefill.gemv_s > 0
    # a token's step reads every weight; its prompt reads them once for all
    weights = decode.work.weights / decode.calls
    assert weights == pytest.approx(model.weight_bytes, rel=1e-4)
    assert prefill.work.weights == pytest.approx(weights, rel=1e-3)
