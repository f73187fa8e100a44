"""Parameters that are kept in at least float32, whatever the model computes in.

No part has such a parameter yet: here it is the norms' weights.
"""

import io

import pytest
import torch
from decoder_parameters import parameters_of
from planned import departures
from rich.console import Console
from tiny_checkpoints import llama_tensors, loaded, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.load.measure.run import measure_load
from llmcli.commands.load.view import render_load
from llmcli.commands.shapes.measure import ShapesRequest
from llmcli.devices import DTYPES
from llmcli.graph.arithmetic import Arithmetic
from llmcli.graph.cost import total_cost
from llmcli.graph.graph import graph
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.plan import _parameters, parameters
from llmcli.graph.rows import Rows
from llmcli.graph.spec import Call
from llmcli.loading.load import load_shapes
from llmcli.nn.parameters import Parameters
from llmcli.records.work import Stages

NORMS = 32 * 5  # numbers of two norms in each of two layers, and of the last one


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch):
    plain = Rows.parameter

    def parameter(*args, **how):
        return plain(*args, **how, **{"wide": True} if how.get("kind") == "norms" else {})

    monkeypatch.setattr(Rows, "parameter", parameter)
    caches = graph, _parameters
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path):
    return write_llama(tmp_path / "m")


@pytest.mark.parametrize(("dtype", "own"), [
    ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"),
    ("float64", "float64"),
])  # fmt: skip
def test_they_keep_their_digits(folder, dtype, own):
    model = loaded(folder, dtype=dtype)
    slots = parameters_of(model.decoder)
    assert slots["blocks.1.ln2.w"].dtype == slots["ln_final.w"].dtype == DTYPES[own]
    assert slots["blocks.1.mlp.W_up"].dtype == DTYPES[dtype]
    stored = llama_tensors()["model.layers.1.post_attention_layernorm.weight"]
    assert torch.equal(slots["blocks.1.ln2.w"], stored.to(DTYPES[own]))
    assert model.decoder(torch.arange(5)[None]).isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_count_of_bytes_is_of_what_lies_in_memory(folder, dtype):
    model = loaded(folder, dtype=dtype)
    held = sum(slot.nbytes for slot in parameters_of(model.decoder).values())
    numbers = sum(slot.numel() for slot in parameters_of(model.decoder).values())
    size = DTYPES[dtype].itemsize
    assert held == size * numbers + (max(size, 4) - size) * NORMS
    numbers = Arithmetic.of(dtype)
    assert model.arithmetic == numbers
    assert numbers.weight_bytes(model.config) == held
    assert model.describe()["weight_bytes"] == held
    assert load_shapes(open_checkpoint(folder), dtype=dtype).weight_bytes == held
    run = PlannedRun(model.config, numbers, batch=1, context=8)
    assert memory_need(run).weights_bytes == held
    calls = ShapesRequest(config=model.config, batch=1, tokens=4, numbers=numbers)
    assert sum(spec.bytes for spec in calls.parameters()) == held
    call = Call(batch=1, tokens=1, past=3, phase="decode")
    table = parameters_of(model.decoder)["embed.W"]
    reads = total_cost(model.config, call, numbers=numbers).weights
    assert reads == held - table.nbytes + table[0].nbytes
    assert departures(model) == {}


def test_the_ledger_says_to_which_dtype_each_was_converted(folder):
    model, report = measure_load(
        open_checkpoint(folder), Stages(), device="cpu", dtype="bfloat16", quantize="auto"
    )
    assert report.ok
    assert report.bytes.weights == model.weight_bytes
    console = Console(width=200, file=io.StringIO())
    console.print(render_load(report, "model", report.rows))
    rows = {line.split()[0]: line for line in console.file.getvalue().splitlines() if line.strip()}
    assert "as it is" in rows["blocks.{0-1}.ln1.w"]
    assert "to bfloat16" in rows["blocks.{0-1}.mlp.W_up"]


def test_what_lies_in_one_tensor_has_one_dtype(folder):
    specs = parameters(loaded(folder, dtype="float32").config, dtype="bfloat16")
    place = Parameters(specs, Arithmetic.of("bfloat16"), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="several dtypes"):
        place.vector(("blocks.0.ln1.w", "blocks.0.mlp.W_up"))
