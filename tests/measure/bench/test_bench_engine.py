"""Engines to benchmark: ours computes what it says and refuses what it cannot; ids, work, roofline.

Work and the roofline of a test are held against sums that are made call by call; order, pieces and
ids are llama-bench's.
"""

import dataclasses
import inspect
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from bench_engines import CEILINGS, all_tests, info, planned, settings, swept
from tiny_checkpoints import write_llama
from zoo import CONFIGS, llama

from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.bench.measure import loader
from llmcli.commands.bench.measure.loader import EngineLoader, refuse_for
from llmcli.commands.bench.report.plan import BenchOutput
from llmcli.decoder.decoder import Decoder
from llmcli.errors import CheckpointError, OutOfMemory, UsageError
from llmcli.graph.cost import cost_by_part, total_cost
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call
from llmcli.loading.load import load_checkpoint, load_shapes
from llmcli.measure.engines import LlmcliEngine, WorkCounter, engine_info, has_flash, random_ids
from llmcli.measure.llama_cpp import LlamaCpp
from llmcli.records.engines import SpeedTest
from llmcli.records.machine import MatrixRate, ReadRate
from llmcli.records.work import Cost
from llmcli.shell.output import Output

IDS = [5, 17, 96, 0, 3, 44, 8, 12, 60]


@pytest.fixture
def folder(tmp_path):
    return write_llama(tmp_path / "model")


def loads(*configurations, **options):
    """`EngineLoader` for a plan with these configurations."""
    plan = planned(configurations, **options)
    return EngineLoader(plan, Output("bench", BenchOutput()), MagicMock(), MagicMock())


def load(folder, **how):
    """Our engine of the model in that folder."""
    chosen = settings(model=str(folder), **how)
    return loads(chosen).load(chosen)


@pytest.fixture
def opened(monkeypatch):
    """`opened()`: the names of the checkpoints that were opened."""
    watched = MagicMock(wraps=open_checkpoint)
    monkeypatch.setattr(loader, "open_checkpoint", watched)
    return lambda: [call.kwargs["name"] for call in watched.call_args_list]


@pytest.fixture
def calls(monkeypatch):
    """Every forward call: (tokens, how many were there, logits)."""
    made, compute = [], Decoder.__call__

    def watched(self, ids, state=None, **options):
        before = state.lengths[0]
        out = compute(self, ids, state, **options)
        made.append((ids.shape[1], before, out))
        return out

    monkeypatch.setattr(Decoder, "__call__", watched)
    return made


def reference(folder, ids, **options):
    model = load_checkpoint(open_checkpoint(folder), device="cpu", dtype="float32", **options)
    return Decoder.__call__(model.decoder, torch.tensor([ids]))[0]


def test_it_computes_the_logits_of_the_last_token_in_chunks(folder, calls, monkeypatch):
    engine = load(folder)
    engine.start(len(IDS) + 2, 1, 4)
    engine.read(IDS)
    engine.step(7)
    engine.rewind(len(IDS))
    engine.step(9)
    assert [made[:2] for made in calls] == [(4, 0), (4, 4), (1, 8), (1, 9), (1, 9)]
    # only the last piece of a prompt has logits, and of them only the last row
    assert [tuple(out.shape) for *_, out in calls] == [(1, 4, 32)] * 2 + [(1, 1, 97)] * 3
    last, seven, nine = (out[0, 0] for *_, out in calls[2:])
    monkeypatch.undo()
    torch.testing.assert_close(last, reference(folder, IDS)[-1])
    torch.testing.assert_close(seven, reference(folder, [*IDS, 7])[-1])
    torch.testing.assert_close(nine, reference(folder, [*IDS, 9])[-1])


def test_a_model_is_loaded_once_for_settings_that_share_it(folder, tmp_path, opened):
    chosen = partial(settings, model=str(folder))
    other = str(write_llama(tmp_path / "other"))
    found = loads(chosen())
    one, off = found.load(chosen()), found.load(chosen(flash_attn="off"))
    assert opened() == [str(folder)]
    assert one.info == off.info
    with pytest.raises(UsageError):
        found.load(chosen(type_k="f16"))
    known = found.known(chosen(type_k="f16"))  # as it was loaded
    assert (known.model_size, known.load_s) == (one.info.model_size, None)
    found.load(chosen(dtype="bfloat16"))
    found.load(settings(dtype="bfloat16", model=other))
    assert opened() == [str(folder), str(folder), other]
    assert [model["weight_format"] for model in found.models.values()] == [
        "float32", "bfloat16", "bfloat16",
    ]  # fmt: skip


def test_a_peer_is_asked_for_all_that_it_takes(folder, monkeypatch):
    opened = MagicMock(side_effect=UsageError("not here"))
    monkeypatch.setattr(loader, "open_peer", opened)
    chosen = settings(model=str(folder), n_batch=7)
    found = loads(chosen, peer="llama.cpp")
    found.load(chosen)
    with pytest.raises(UsageError, match="not here"):
        found.peer(chosen)
    asked, taken = opened.call_args.kwargs, inspect.signature(LlamaCpp).parameters
    assert asked == {name: getattr(chosen, name) for name in taken if name != "ours"}


def test_on_a_gpu_all_layers_are_there_or_none():
    def ask(rounds=True, **asked):
        refuse_for(settings(**asked), info(type_k="f16", gpu_layers=5), flash=True, rounds=rounds)

    ask(n_gpu_layers=99)
    ask(n_gpu_layers=5)
    ask(n_gpu_layers=-1, type_k="f16")
    for asked in ({"n_gpu_layers": 4}, {"n_gpu_layers": 0}, {"no_kv_offload": True}):
        with pytest.raises(UsageError):
            ask(**asked)
    ask(activations="8")
    with pytest.raises(UsageError, match="`--activations 8` has no effect"):
        ask(activations="8", rounds=False)


def test_what_does_not_fit_is_out_of_memory(folder, monkeypatch):
    engine = load(folder)
    slow = load(folder, flash_attn="off")
    engine.start(8, 1, 4)
    monkeypatch.setattr(devices, "available_bytes", lambda device: 1_400_000)
    engine.start(900, 1, 4)
    with pytest.raises(OutOfMemory, match="cache of 4000 tokens and reading 4 of them"):
        engine.start(4000, 1, 4)
    with pytest.raises(OutOfMemory, match="reading 900 of them"):  # the activations do not fit
        engine.start(900, 1, 2000)
    slow.start(900, 1, 4)
    engine.start(900, 1, 60)
    with pytest.raises(OutOfMemory):  # nor the scores of all pairs
        slow.start(900, 1, 60)


def test_an_engine_has_the_threads_that_it_starts_with_and_computes_nothing_when_closed(folder):
    engine = load(folder)
    for threads in (2, 1):
        engine.start(4, threads, 4)
        assert torch.get_num_threads() == threads
    engine.close()
    with pytest.raises(ValueError, match="not been started"):
        engine.read([1])


def test_a_configuration_alone_is_enough_with_random_weights_or_for_shapes(folder, calls):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)
    drawn = settings(model=str(folder))
    engine = loads(drawn, random_weights=True, seed=3).load(drawn)
    engine.start(8, 1, 4)
    engine.read([1, 2])
    calls.clear()
    engine = load(folder, device="meta")
    found = engine.info
    assert (found.device, found.backends, found.dtype) == ("meta", "meta", "float32")
    assert (found.base_bytes, found.load_peak) == (None, None)
    engine.start(12, 1, 4)
    engine.read(IDS)
    engine.step(1)
    shapes = [(1, 4, 32), (1, 4, 32), (1, 1, 97), (1, 1, 97)]  # the last piece alone has logits
    assert [tuple(out.shape) for *_, out in calls] == shapes
    assert {out.device.type for *_, out in calls} == {"meta"}


def test_shapes_are_of_the_dtype_that_the_device_would_have(folder):
    checkpoint = open_checkpoint(folder)
    model = load_checkpoint(checkpoint, device="cpu")
    assert load_shapes(checkpoint, like="cpu").dtype == model.dtype
    assert load_shapes(checkpoint, dtype="float16").dtype == torch.float16
    assert load_shapes(checkpoint).weight_bytes > 0
    with pytest.raises(UsageError):
        load_shapes(checkpoint, dtype="int3")


def test_prompts_begin_with_bos_where_the_tokenizer_adds_it(folder):
    model = load_checkpoint(open_checkpoint(folder), device="cpu", dtype="float32")
    assert LlmcliEngine(model, engine_info(model, 0.0)).bos is None
    for adds, bos in ((True, 11), (False, None)):
        model.tokenizer = SimpleNamespace(bos_id=11, add_bos=adds)
        assert LlmcliEngine(model, engine_info(model, 0.0)).bos == bos


def test_headers_say_what_a_model_is_that_was_not_loaded(folder, opened, tmp_path):
    chosen = partial(settings, model=str(folder))
    found = loads(chosen())
    known = found.known(chosen(type_k="q8_0"))
    there = load(folder).info
    assert known == dataclasses.replace(there.without_memory(), load_s=None)
    assert found.known(chosen(type_k="q4_0")) is known
    assert opened() == [str(folder)] * 2
    assert found.known(chosen(dtype="bfloat16")).type_k == "bf16"
    assert found.known(chosen(device="meta")).device == "meta"
    assert found.known(chosen(device="cuda:99")) is None  # in a dtype that cannot be known
    assert found.known(settings(model=str(tmp_path / "nowhere"))) is None


@pytest.mark.parametrize(("device", "dtype", "capability", "there"), [
    ("cpu", "float32", None, True), ("cuda", "bfloat16", (9, 0), True),
    ("cuda", "float16", (8, 0), True), ("cuda", "float32", (9, 0), False),
    ("cuda", "bfloat16", (7, 5), False), ("mps", "float16", None, False),
])  # fmt: skip
def test_where_there_is_flash_attention(monkeypatch, device, dtype, capability, there):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_flash(torch.device(device), getattr(torch, dtype)) is there


def test_flash_attention_that_is_not_there_is_refused(folder, monkeypatch):
    monkeypatch.setattr(loader, "has_flash", lambda device, dtype: False)
    with pytest.raises(UsageError, match="no flash attention in f32") as error:
        load(folder, flash_attn="on")
    assert "-fa" in error.value.hint
    for way in ("auto", "off"):
        load(folder, flash_attn=way)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_every_call_is_done_when_it_returns(folder):
    engine = load(folder, device="cuda:0")
    assert (engine.info.backends, engine.info.gpu_layers) == ("CUDA", 3)
    engine.start(len(IDS) + 1, 1, 4)
    for call in (lambda: engine.read(IDS), lambda: engine.step(3)):
        call()
        assert torch.cuda.current_stream().query()
    chosen = partial(settings, model=str(folder), device="cuda:0")
    gpu = [chosen(), chosen(n_gpu_layers=1)]
    tests = all_tests([6], [3], [], [0, 4])
    _, rows = swept(loads(*gpu).load, configurations=gpu, tests=tests, warmup=True)
    assert [bool(row.error) for row in rows] == [False] * 4 + [True] * 4
    for row in rows[:4]:
        most = (row.peak_memory_bytes, row.prefill_device_bytes, row.decode_device_bytes)
        assert all(one >= row.model_size for one in most if one is not None)
    with pytest.raises(UsageError, match="no flash attention in f32"):
        load(folder, device="cuda:0", flash_attn="on")
    load(folder, device="cuda:0", dtype="bfloat16", flash_attn="on")


# what a test computes and reads

BFLOAT16 = Precision.of("bfloat16")
SIZES = 2048, 512  # of a batch and of a call, llama-bench's
LLAMA = WorkCounter(config=llama(), precision=Precision.of("float32"))
ONE = SpeedTest(n_prompt=0, n_gen=1)
WORK = LLAMA.work(ONE, *SIZES)


def made(flops_per_s, *reads):
    """Ceilings of a machine with these rates."""
    matrices = (MatrixRate(dtype="float32", flops_per_s=flops_per_s),)
    return dataclasses.replace(CEILINGS, reads=reads, matrices=matrices)


@pytest.mark.parametrize("name", ["gpt2", "llama", "window", "layers that differ"])
def test_work_is_that_of_every_call(name):
    config, test = CONFIGS[name], SpeedTest(n_prompt=11, n_gen=3, n_depth=5)
    calls = [("prefill", 5, 4, "none"), ("prefill", 9, 2, "last")]  # 6 at a time: two batches,
    calls += [("prefill", 11, 4, "none"), ("prefill", 15, 1, "last")]  # each ends with logits
    calls += [("decode", past, 1, "last") for past in (16, 17, 18)]
    parts = [
        total_cost(
            config, Call(batch=1, tokens=tokens, past=past, phase=phase), precision=BFLOAT16,
            logits=logits,
        )
        for phase, past, tokens, logits in calls
    ]  # fmt: skip
    found = WorkCounter(config=config, precision=BFLOAT16).work(test, 6, 4)
    assert found == sum(parts, Cost())


def test_a_depth_is_not_counted_but_read():
    deep = LLAMA.work(dataclasses.replace(ONE, n_depth=30), *SIZES)
    assert deep.weights == WORK.weights
    # 30 keys and values more of 2 heads of 8 numbers in 2 layers, and their products
    assert deep.cache - WORK.cache == 2 * 30 * 2 * (8 + 8) * 4
    assert deep.flops - WORK.flops == 2 * 30 * 4 * (2 * 8 + 2 * 8)


def test_the_roofline_is_the_sum_over_parts_of_what_they_wait_for():
    def least(bytes_per_s, flops_per_s):
        memory = ReadRate(nbytes=10**9, bytes_per_s=bytes_per_s, level="memory")
        return LLAMA.roofline_ns(ONE, *SIZES, made(flops_per_s, memory))

    assert least(1e9, 1e30) == pytest.approx(WORK.bytes)  # a byte takes a nanosecond
    assert least(1e30, 1e9) == pytest.approx(WORK.flops)
    both = least(1e9, 4e8)  # norms wait for their bytes, matrices for their products
    calls = [(Call(batch=1, tokens=1, past=0, phase="decode"), "last")]
    parts = cost_by_part(LLAMA.config, calls, precision=LLAMA.precision)
    longer = sum(max(part.bytes, part.flops / 0.4) for part in parts.values())
    assert both == pytest.approx(longer)
    assert max(WORK.bytes, WORK.flops / 0.4) + 100 < longer < WORK.bytes + WORK.flops / 0.4 - 100


def test_weights_come_from_where_all_that_a_step_reads_lies_and_activations_from_their_own():
    def least(test, nbytes):
        cache = ReadRate(nbytes=nbytes, bytes_per_s=4e9, level="L2")
        return LLAMA.roofline_ns(test, *SIZES, made(1e30, cache, CEILINGS.reads[1]))

    streamed = WORK.weights + WORK.cache
    assert least(ONE, streamed) == pytest.approx((streamed + WORK.activations) / 4)
    # what a part passes on still fits
    assert least(ONE, streamed - 1) == pytest.approx(streamed + WORK.activations / 4)
    # a second token reads it all again, out of the same cache: not twice as much at a time
    two = SpeedTest(n_prompt=0, n_gen=2)
    assert least(two, streamed + 1000) == pytest.approx(LLAMA.work(two, *SIZES).bytes / 4)


def test_a_step_reads_the_weights_and_the_keys_of_all_tokens_before():
    empty, full = map(LLAMA.working_set, (ONE, SpeedTest(n_prompt=8, n_gen=3, n_depth=20)))
    assert empty == WORK.weights + WORK.cache
    assert full - empty == 2 * 30 * 2 * (8 + 8) * 4  # as above: 30 tokens more


def test_there_is_no_roofline_where_a_rate_was_not_measured():
    formats = {"blocks.0.mlp.W_up": "bfloat16"}  # products in it, attention in float32
    mixed = dataclasses.replace(LLAMA.precision, formats=formats, bf16_dot=True)
    counter = dataclasses.replace(LLAMA, precision=mixed)
    for dtype in ("float32", "bfloat16"):
        alone = (MatrixRate(dtype=dtype, flops_per_s=1e10),)
        ceilings = dataclasses.replace(CEILINGS, matrices=alone)
        assert counter.roofline_ns(ONE, *SIZES, ceilings) is None


def test_memory_is_that_of_all_tokens():
    one, other = (
        LLAMA.memory_bytes(SpeedTest(n_prompt=n, n_gen=1, n_depth=d), 512)
        for n, d in ((4, 0), (2, 2))
    )
    assert one == other
    weights = sum(  # two numbers each of the vocabulary, and the layers
        (43 * 16 * 2, 16, *(2 * 16, 2 * 16 * 32, 2 * 16 * 16, 3 * 16 * 30) * 2)
    )
    assert one > 4 * weights
    long = SpeedTest(n_prompt=900, n_gen=0)
    needs = [LLAMA.memory_bytes(long, n) for n in (1, 64, 512)]
    assert needs[0] < needs[1] < needs[2]


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_memory_is_that_of_the_device_and_not_of_the_processor(kind, monkeypatch):
    """A GPU multiplies bfloat16 beside a processor that may not."""
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device(kind))
    monkeypatch.setattr(devices.processor, "has_bfloat16", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = WorkCounter(config=llama(), precision=BFLOAT16).memory_bytes(
        SpeedTest(n_prompt=900, n_gen=0), 512
    )
    run = PlannedRun(
        llama(), BFLOAT16, batch=1, context=900, chunk=512, native=True, cuda=kind == "cuda"
    )
    assert found == memory_need(run).needed_bytes


@pytest.mark.parametrize(("tokens", "batch", "ubatch", "calls"), [
    (10, 100, 100, [(0, 10, "last")]),
    (10, 100, 4, [(0, 4, "none"), (4, 4, "none"), (8, 2, "last")]),
    (10, 6, 4, [(0, 4, "none"), (4, 2, "last"), (6, 4, "last")]),
    (12, 6, 100, [(0, 6, "last"), (6, 6, "last")]),  # n_batch at a time at most
    (0, 6, 4, []),
])
def test_a_prompt_is_read_in_batches_and_those_in_micro_batches(tokens, batch, ubatch, calls):
    chosen = settings(n_batch=batch, n_ubatch=ubatch)
    for depth in (0, 5):
        found = list(LLAMA.calls(tokens, batch, chosen.chunk, depth))
        assert [(call.past - depth, call.tokens, logits) for call, logits in found] == calls
        assert all(call.phase == "prefill" and call.batch == 1 for call, _ in found)
    assert chosen.chunk == min(batch, ubatch)


def test_ids_are_random_repeatable_and_begin_with_bos():
    ids = random_ids(1, "pp512 0", 512, 97, None)
    assert ids == random_ids(1, "pp512 0", 512, 97, None)
    assert len(ids) == 512
    assert set(ids) <= set(range(97))
    assert len(set(ids)) > 80
    assert ids != random_ids(1, "pp512 1", 512, 97, None)
    assert ids != random_ids(2, "pp512 0", 512, 97, None)
    assert random_ids(1, "pp512 0", 512, 97, 5) == [5, *ids[1:]]
    assert random_ids(1, "pp512 0", 0, 97, 5) == []
