"""Weights in blocks on a card that is not there: captured steps, prompts, estimates, loading.

The kernels of products stand for themselves in `triton_twins`; here their numbers are those of the
dequantized matrix.
"""

from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from card import Card
from covers import covered, in_turn
from small_models import as_model, ids, random_blocks, random_decoder
from test_gate import CAPACITY, FIRST, calls_of, decoded, same, sessions
from test_graph_packed import wrong
from zoo import BLOCKS, IN_BLOCKS, gpt2, in_blocks, layer, llama

from llmcli import devices
from llmcli.checkpoints import open_model
from llmcli.config.embedding import HeadConfig
from llmcli.config.formats import ON_CARD
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.errors import OutOfMemory
from llmcli.graph.graph import Graph
from llmcli.graph.memory import PlannedRun, prefill_peak
from llmcli.graph.precision import Precision, in_no_blocks, matrices, resolve_precision
from llmcli.kernels import native
from llmcli.loading.load import load, load_checkpoint
from llmcli.loading.weights import randomize
from llmcli.model import dtype_name
from llmcli.ops import on_card
from llmcli.ops.quant import FORMATS, dequantize
from llmcli.weights.blocks import FileLayoutWeight
from llmcli.weights.dense import writable
from llmcli.weights.packed import fused

HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 32, "value_dim": 32, "scale": 32**-0.5}
CLAMPED = "experts, a matrix of them dense"
MODELS = {
    "q4_k_m": in_blocks(
        llama(*(layer(**HEADS),) * 2, head=HeadConfig(tied=True)), "Q4_K", "Q6_K", "Q5_0", "Q8_0",
        "Q5_K", size=256,
    ),
    "biases": in_blocks(gpt2(heads=4, kv_heads=4), "Q4_0", "Q4_1", "Q8_0"),
    "keys that are dense": in_blocks(llama(), "Q8_0", "Q4_1", dense=("W_k", "W_gate")),
    "experts": IN_BLOCKS["experts"],
    "experts beside dense layers": IN_BLOCKS["experts beside dense layers"],
    CLAMPED: in_blocks(
        BLOCKS["experts with biases and clamped gates"], "Q8_0", "Q4_1", dense=("moe.W_gate",)
    ),
}  # fmt: skip
calls = []


def packed_product(x, raw, format, b=None, *, out):
    calls.append(format)
    b = None if b is None else b.float()
    return F.linear(x.float(), dequantize(raw, format, dtype=torch.float32), b).to(out)


def routed_product(x, raw, format, routed, b=None, *, out):
    calls.append(format)
    expert, row, each = routed
    dense = dequantize(raw.flatten(0, 1), format, dtype=torch.float32).view(*raw.shape[:2], -1)
    row = torch.arange(len(expert), device=x.device) // each if row is None else row
    y = torch.bmm(dense[expert], x[row].float().unsqueeze(2)).squeeze(2)
    return (y if b is None else y + b[expert].float()).to(out)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """They give the other kernels up, which `test_triton` has."""
    calls.clear()
    made = SimpleNamespace(packed_product=packed_product, routed_product=routed_product)
    monkeypatch.setattr(on_card, "kernels", lambda: made)
    for name in ("attends", "enters", "multiplies", "multiplies_experts", "normalizes",
                 "routes", "sums_experts"):  # fmt: skip
        monkeypatch.setattr(on_card, name, lambda *given: False)


def in_blocks(config, formats, device, dtype="float32"):
    precision = Precision(dtype=dtype, cache=dtype, formats=formats, file_layout=True)
    return Decoder(config, precision, device=device)


def filled(name, device, dtype=torch.float32):
    """Of a processor with the dequantized numbers, and of a device with the blocks."""
    config, formats = MODELS[name]
    here = random_decoder(config, torch.float32)
    there = in_blocks(config, formats, device, dtype_name(dtype))
    generator = torch.Generator().manual_seed(5)
    for name in there.weight_names:
        weight, slot = there.weight(name), writable(here.weight(name))
        if isinstance(weight, FileLayoutWeight):
            raw = random_blocks(weight.format, slot[..., 0].numel(), slot.shape[-1], generator)
            slot.copy_(dequantize(raw, weight.format, dtype=torch.float32).view(slot.shape))
            order = torch.randperm(len(raw), generator=generator)
            for rows in order.split(50):
                weight.write(rows, raw[rows])
        else:
            writable(weight).copy_(slot)
    return here, there


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_turn(covered(name for name in MODELS if name != CLAMPED), [torch.bfloat16, torch.float32]),
)
def test_what_is_emitted_is_what_the_nodes_make(name, dtype):
    """Of the numbers of the blocks, as `explain` has them, which products of many rows round.

    Clamped gates are off by more in bfloat16, those of a dense model, too.
    """
    _, decoder = filled(name, "cpu", dtype)
    assert wrong(as_model(decoder), Graph(decoder.config).nodes) == {}


@pytest.mark.parametrize(("name", "batch"), in_turn(covered(MODELS), [3, 1]))
def test_a_captured_step_is_that_of_the_dequantized_model(name, batch):
    """Over two buckets, after prompts that are read by dequantizing."""
    with torch.inference_mode(), Card(float64=False) as card:
        here, there = filled(name, "cuda")
        card.put(there, FIRST)
        prompts = [[5, 9, 2, 7, 1], [3, 1, 4], [8, 2, 6, 1]][:batch]
        ordinary, captured = sessions(here, there, prompts)
        if "experts" not in name:  # few tokens choose few of them
            assert not set(calls) - {there.head.format}  # of the last tokens alone
        calls.clear()
        tokens = ids(batch, 7)
        same(decoded(captured, tokens), decoded(ordinary, tokens), 1e-4)
        assert len(captured.state.recorded) == len(card.tapes) == 2
        assert set(calls) == set(MODELS[name][1].values())


@pytest.mark.parametrize("name", covered(MODELS))
def test_every_step_of_a_bucket_launches_the_same(name):
    """In bfloat16, as on a card; and it looks at no number."""
    with torch.inference_mode(), Card(float64=False) as card:
        decoder = card.put(in_blocks(*MODELS[name], "cuda", "bfloat16"), FIRST)
        session = Session(decoder, 2, CAPACITY)
        for _ in range(2):
            session.extend(torch.ones(2, 1, dtype=torch.long, device="cuda"))
        assert calls_of(card, session) == calls_of(card, session)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("format", ON_CARD)
def test_a_weight_in_blocks(format, rows, monkeypatch):
    """Products of few rows have its numbers; those of many a part of it at a time, rounded once."""
    columns = 2 * FORMATS[format][0]
    monkeypatch.setattr("llmcli.weights.blocks.DEQUANTIZED_AT_ONCE", 5 * columns)
    generator = torch.Generator().manual_seed(0)
    raw = random_blocks(format, 13, columns, generator)
    numbers = dequantize(raw, format, dtype=torch.float32)
    x, b = (torch.randn(*shape, generator=generator) for shape in ((rows, columns), (13,)))
    with torch.inference_mode(), Card():
        device = torch.device("cuda")
        weight = FileLayoutWeight(format, (13, columns), device=device, inputs=torch.bfloat16)
        weight.write(torch.arange(13), raw)
        assert (weight.shape, weight.format, weight.nbytes) == ((13, columns), format, raw.nbytes)
        asked = torch.tensor([[3, 3], [12, 0]])
        assert torch.equal(weight.rows(asked.to("cuda")).cpu(), numbers[asked])
        part = weight.dense(torch.bfloat16, rows=slice(2, 5)).cpu()
        assert torch.equal(part, numbers[2:5].bfloat16())
        whole = fused([weight, weight])
        for dtype in (torch.float32, torch.bfloat16):
            read = weight.quantized_input(x.to("cuda")).cpu() if dtype == torch.bfloat16 else x
            used = numbers.to(dtype).float() if rows > 1 else numbers
            added = b.to(dtype).float()
            want = F.linear(read.float(), used, added)
            given = read.to("cuda", dtype), b.to("cuda", dtype)
            for product in ("matmul_fp32_out", "matmul_float32"):
                got = getattr(weight, product)(*given)
                assert got.dtype == torch.float32
                torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
            both = whole.matmul_fp32_out(given[0], torch.cat((given[1], -given[1]))).cpu()
            other = F.linear(read.float(), used, -added)
            torch.testing.assert_close(both, torch.cat((want, other), -1), rtol=1e-5, atol=1e-5)
            got = weight.matmul(*given)
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.cpu().float(), want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-2
            )
    assert bool(calls) == (rows == 1)


def precision_of(name, monkeypatch, *, triton=True, **options):
    monkeypatch.setattr(native, "_groups", lambda: native.GROUPS if triton else "off")
    config, formats = MODELS[name]
    given = {"dtype": "auto", "quantize": "auto", **options}
    return resolve_precision(
        config, device="cuda", stored=set(formats.values()), bfloat16=True, packable=formats,
        kernels=native.kernels_of("cuda"), **given,
    )  # fmt: skip


def test_blocks_stay_where_their_kernels_are_wanted(monkeypatch):
    config, formats = MODELS["q4_k_m"]
    precision = precision_of("q4_k_m", monkeypatch)
    assert precision == Precision(
        dtype="bfloat16", cache="bfloat16", formats=formats, file_layout=True
    )
    assert precision.products == "bfloat16"
    decoder = Decoder(config, precision, device="meta")
    held = {name: decoder.weight(name).nbytes for name in decoder.weight_names}
    stored = {
        name: prod(decoder.weight(name).shape) // FORMATS[format][0] * FORMATS[format][1]
        for name, format in formats.items()
    }
    assert held == held | stored
    assert precision.weight_bytes(config) == sum(held.values())
    assert {spec.name: spec.bytes for spec in precision.parameters(config)} == held
    assert decoder.precision == precision
    dense = Precision.of("bfloat16")
    of_a_matrix = max(decoder.weight(name).count for name in formats) * (2 + 8)
    runs = [PlannedRun(config, one, batch=1, context=64, cuda=True) for one in (precision, dense)]
    peaks = [prefill_peak(run) for run in runs]
    assert peaks[0] - peaks[1] == of_a_matrix
    assert precision_of("q4_k_m", monkeypatch, triton=False) == dense
    assert precision_of("q4_k_m", monkeypatch, dtype="bfloat16") == dense
    assert precision_of("q4_k_m", monkeypatch, quantize="none") == dense
    assert precision_of("q4_k_m", monkeypatch, dtype="float32") == Precision.of("float32")


def test_a_card_quantizes_where_it_has_kernels(monkeypatch):
    config, _ = MODELS["keys that are dense"]
    precision = precision_of("keys that are dense", monkeypatch, quantize="int4")
    assert precision.file_layout
    assert precision.formats.keys() == matrices(config).keys() - in_no_blocks(config, card=True)
    assert precision.formats["blocks.0.attn.W_k"] == "Q4_1"
    config, _ = MODELS["biases"]  # formats without a kernel are dequantized
    made = {"stored": {"Q4_0"}, "bfloat16": True, "dtype": "auto", "quantize": "auto"}
    formats = dict.fromkeys(matrices(config), "IQ4_NL")
    precision = resolve_precision(config, device="cuda", packable=formats, kernels="triton", **made)
    assert precision == Precision.of("bfloat16")


@pytest.fixture
def free(monkeypatch):
    """A card with so many bytes, to be changed."""
    free = [1 << 30]
    monkeypatch.setattr(devices, "available_bytes", lambda device: free[0])
    monkeypatch.setattr(devices, "resolve_device", torch.device)
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return free


@pytest.fixture
def unchecked(monkeypatch):
    """Nothing is computed while a model is loaded."""
    monkeypatch.setattr(on_card, "check", lambda steps, dtype: None)


@pytest.mark.real
def test_a_file_is_loaded_as_it_is(free, unchecked):
    """Rows of queries and keys are in another order than in the file."""
    exact, given = load("smollm2", device="cpu", dtype="float32"), torch.tensor([[5, 9, 2]])
    sought = exact.decoder(given).log_softmax(-1)
    for quantize in ("auto", "int8"):
        with torch.inference_mode(), Card():
            model = load("smollm2", device="cuda", quantize=quantize)
            about = model.describe()
            assert about["weight_bytes"] == model.precision.weight_bytes(model.config) < 110 << 20
            assert about["weight_format"].startswith("Q4_1")
            assert about["activation_format"] == about["product_format"] == "bfloat16"
            assert not [entry for entry in model.ledger.entries if entry.dequantized]
            for name in model.decoder.weight_names:
                weight = model.decoder.weight(name)
                assert torch.equal(weight.dense().cpu().float(), exact.decoder.weight(name).dense())
            found = model.decoder(given.to("cuda")).cpu().log_softmax(-1)
        assert F.kl_div(found, sought, log_target=True, reduction="sum") < 0.01


@pytest.mark.parametrize("fails", [False, True])
def test_loading_checks_the_kernels(fails, free, monkeypatch):
    """If they fail, weights stay in blocks, and PyTorch computes their products."""

    def broken(*args):
        raise RuntimeError("no kernel image")

    if fails:
        monkeypatch.setattr(on_card, "product_of_blocks", broken)
    given, notes = torch.tensor([[5, 9, 2]]), []
    sought = load("tiny", device="cpu", dtype="float32").decoder(given)[0, 1:].log_softmax(-1)
    with torch.inference_mode(), Card():
        native.TRITON_STATE.warn = notes.append
        model = load("tiny", device="cuda", quantize="int8")
        assert native.TRITON_STATE.checked == (not fails)
        assert bool(calls) == (not fails)
        assert isinstance(model.decoder.weight("blocks.0.attn.W_q"), FileLayoutWeight)
        found = model.decoder(given.to("cuda")).cpu()[0, 1:].log_softmax(-1)
    assert notes == ["Triton's kernels are off: `a step` failed: no kernel image"] * fails
    assert F.kl_div(found, sought, log_target=True, reduction="sum") < 0.01


def test_drawn_numbers_are_quantized_and_the_same_on_every_device():
    for config, formats in ((BLOCKS["experts"], {}), MODELS["keys that are dense"]):
        decoder = in_blocks(config, formats, "cpu")
        randomize(decoder, 3)
        with torch.inference_mode(), Card():
            there = in_blocks(config, formats, "cuda")
            randomize(there, 3)
            for name in there.weight_names:
                same = torch.equal(there.weight(name).dense().cpu(), decoder.weight(name).dense())
                assert same, name
    weight = decoder.weight("blocks.0.attn.W_q")
    assert isinstance(weight, FileLayoutWeight)
    assert 0.015 < float(weight.dense().std()) < 0.025


@pytest.mark.real
def test_memory_is_required_for_the_blocks(free, unchecked):
    checkpoint = open_model("smollm2")
    free[0] = 90 << 20
    with Card(), pytest.raises(OutOfMemory, match=r"need 92\.0 MiB"):
        load_checkpoint(checkpoint, device="cuda", text=False)
    free[0] = 250 << 20
    with Card(), pytest.raises(OutOfMemory, match="the weights need"):
        load_checkpoint(checkpoint, device="cuda", dtype="bfloat16", text=False)
    with torch.inference_mode(), Card():
        load_checkpoint(checkpoint, device="cuda", text=False)
