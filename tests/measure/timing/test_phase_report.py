"""What a phase says: products by the rows of their call, the cost of looking, what was done."""

import pytest
from small_models import ids
from timed_models import PROMPT, red, small, timed

from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.commands.timing.measure import run as timing_run
from llmcli.commands.timing.measure import unfused
from llmcli.commands.timing.measure.checks import memory_check, timing_checks
from llmcli.commands.timing.measure.parts import Piece
from llmcli.commands.timing.measure.phase import overhead, product_seconds
from llmcli.engine.session import Session
from llmcli.reports.work import PartWork

MIB = 1 << 20
PRODUCTS = {"qkv", "out", "ffn_up", "ffn_down", "head"}


def piece(part, layer, call, seconds):
    return Piece(place=(part, layer), call=call, begin=0.0, seconds=seconds, host_s=0.0)


def test_products_are_told_by_the_call_that_they_are_in():
    many, one = PartWork(gemm=1), PartWork(gemv=1)
    calls = ({("out", 0): many, ("head", None): one}, {("out", 0): one, ("head", None): one})
    run = [piece("out", 0, 0, 1.0), piece("norm", 0, 0, 2.0), piece("head", None, 0, 4.0),
           piece("out", 0, 1, 8.0), piece("head", None, 1, 16.0), piece("gaps", None, 2, 32.0),
           piece("gaps", None, -1, 64.0)]  # fmt: skip
    assert product_seconds(run, calls) == (4.0 + 8.0 + 16.0, 1.0)


def test_a_prompt_of_one_token_more_than_a_chunk_has_both():
    """513 tokens: 512 are read by GEMMs and the last one by GEMVs."""
    prompt = ids(1, PROMPT_CHUNK + 1)[0].tolist()
    (prefill,) = timed(small("window"), prompt, new_tokens=0, trace=True).phases
    spans = [span for span in prefill.spans if span.part in PRODUCTS]
    many = sum(span.seconds for span in spans if span.call == 0)
    one = sum(span.seconds for span in spans if span.call == 1)
    assert one > 0
    assert (prefill.gemm_s, prefill.gemv_s) == (pytest.approx(many), pytest.approx(one))
    assert {span.call for span in spans if span.part == "head"} == {1}


def test_of_a_prompt_that_is_one_call_the_head_alone_has_one_row():
    prefill, decode = timed(small("llama"), new_tokens=2).phases
    head = next(part.seconds for part in prefill.totals if part.part == "head")
    assert prefill.gemv_s == pytest.approx(head)
    assert (decode.gemm_s, decode.gemv_s) == (
        0.0, pytest.approx(sum(p.seconds for p in decode.totals if p.part in PRODUCTS))
    )  # fmt: skip
    two = timed(small("llama"), new_tokens=2, batch=2).phases[1]
    assert two.gemv_s == 0.0
    assert two.gemm_s > 0


def test_looking_may_cost_nothing_where_half_of_the_pairs_straddle_it():
    cost = overhead((1.0, 1.1, 1.2, 1.3, 1.4), (1.0,) * 5)
    assert (cost.lowest, cost.median, cost.highest) == (1.0, 1.2, 1.4)
    assert cost.quartiles == pytest.approx((1.1, 1.3))
    assert not cost.within_noise
    assert overhead((0.9, 0.95, 1.0, 1.3, 1.4), (1.0,) * 5).within_noise


def test_with_and_without_the_lower_of_two_in_the_middle_is_the_median():
    report = timed(small("llama"), pairs=4)
    for phase in report.phases:
        assert phase.seconds == sorted(phase.overhead.watched_s)[1]
        assert phase.bare_s == sorted(phase.overhead.bare_s)[1]


def test_the_collector_is_off_while_something_is_timed(monkeypatch):
    import gc

    seen, run = [], timing_run.Job.run

    def watched(self, *args, **rest):
        seen.append(gc.isenabled())
        return run(self, *args, **rest)

    monkeypatch.setattr(timing_run.Job, "run", watched)
    timed(small("llama"), unfused=True)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


# -- memory


def test_what_was_held_is_compared_with_the_estimate():
    base, estimated = 300 * MIB, 1000 * MIB
    for taken, ok in ((1000, True), (1115, True), (1117, False), (885, True), (883, False)):
        (check,) = memory_check(base, base + taken * MIB, estimated)
        assert check.ok == ok, taken
    assert check.name == "memory"


def test_of_a_small_model_16_mib_may_be_more():
    assert memory_check(0, 17 * MIB, 1 * MIB)[0].ok
    assert not memory_check(0, 18 * MIB, 1 * MIB)[0].ok


def test_what_is_not_known_is_not_judged():
    assert memory_check(None, 1, 1) == memory_check(1, None, 1) == ()
    model = small("llama")
    assert "memory" not in {check.name for check in timed(model).checks}
    assert "memory" in red(timed(model, base=-(10**12)))
    decode = timed(model, base=-(10**12), phases=("decode",))
    assert "memory" not in {check.name for check in decode.checks}


# -- cut short


def stopping(monkeypatch, module, name, at):
    """A KeyboardInterrupt in call `at` of a function."""
    real, calls = getattr(module, name), []

    def stops(*args, **rest):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*args, **rest)

    monkeypatch.setattr(module, name, stops)


def test_pairs_that_were_whole_are_reported(monkeypatch):
    stopping(monkeypatch, timing_run, "_pair", 3)
    report = timed(small("llama"), pairs=9)
    assert report.interrupted
    (prefill,) = report.phases
    assert (prefill.name, len(prefill.overhead.ratios)) == ("prefill", 2)
    assert prefill.seconds == min(prefill.overhead.watched_s)
    assert {check.name for check in report.checks} == {"adds_up", "marks", "flops", "same"}
    assert red(report) <= {"adds_up"}


def test_a_phase_without_a_pair_is_left_out(monkeypatch):
    stopping(monkeypatch, timing_run, "_bare", 5)  # a warm-up and two pairs; the next warm-up
    report = timed(small("llama"), pairs=2)
    assert report.interrupted
    assert [len(phase.overhead.ratios) for phase in report.phases] == [2]


def test_before_the_first_pair_there_is_nothing_but_the_machine(monkeypatch):
    stopping(monkeypatch, timing_run, "_bare", 1)
    report = timed(small("llama"))
    assert (report.interrupted, report.phases, report.checks, report.splits) == (True, (), (), ())
    assert report.estimated > 0
    assert timing_checks((), {}, {}, {}) == ()


def test_pieces_that_were_cut_short_leave_the_phases(monkeypatch):
    stopping(monkeypatch, unfused, "_seconds", 4)
    report = timed(small("llama"), unfused=True)
    assert report.interrupted
    assert (len(report.phases), report.splits) == (2, ())


def test_to_the_end_nothing_was_interrupted():
    assert not timed(small("llama")).interrupted


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
