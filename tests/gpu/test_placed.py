"""Layers on several devices: which of them where, and that the numbers are those of one device.

`cpu:0` is another device by its name, which computes the same bits. `card.Card` stands for a CUDA
device, which refuses tensors of another one.
"""

import json
from itertools import pairwise

import pytest
import torch
from card import Card, OnCard
from covers import in_turn
from gguf_model import metadata, shapes, write_file
from small_models import as_model, ids, random_decoder, walked
from zoo import MODELS

from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.cli.app import main
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.decoder.decoder import Decoder
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session, make_room
from llmcli.engine.stream import TextRequest, stream
from llmcli.errors import OutOfMemory, UsageError
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.names import known
from llmcli.inspect.passes import Passes
from llmcli.kernels import native
from llmcli.loading.load import load_checkpoint, placed_on
from llmcli.measure.peers import open_peer
from llmcli.nn.step import Edit
from llmcli.ops.quant import quantize
from llmcli.prepare.placement import Need, layers_on, listed, placement_words
from llmcli.prepare.prepared import prepare
from llmcli.weights.blocks import FileLayoutWeight
from llmcli.weights.dense import writable
from llmcli.weights.packed import Packed

CPU, SAME, CARD = map(torch.device, ("cpu", "cpu:0", "cuda:0"))
FREE = {"cuda": 1 << 40, "cpu": 1 << 40}
PROMPTS = [[5, 9, 2, 7], [3, 1]]
# what layers share, keep, and take from the step; the other models are exhaustive
SHARING = (
    "keys and values of another layer", "embeddings for each layer", "layers that differ", "window",
    "mamba-2", "gated deltanet", "latent attention", "short convolutions", "longrope", "sinks",
    "scores lowered by distance", "experts beside the feed-forward", "gpt2, scale of its own",
)  # fmt: skip
VIEWED = SHARING[0], *SHARING[5:7], *SHARING[9:11]

COUNTS = {"one": lambda n: 1, "half": lambda n: -(-n // 2), "all": lambda n: n}


@pytest.fixture
def card(monkeypatch):
    """With as many free bytes on each kind of device as `FREE` says, which is to be changed."""
    free = FREE.copy()
    monkeypatch.setattr(devices, "available_bytes", lambda device: free[device.type])
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda device: device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("synchronize", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    with torch.inference_mode(), Card():
        yield free


def split(here, device, first):
    """The same model, whose `first` layers are on `device`."""
    placed = [device] * first + [CPU] * (len(here.config.layers) - first)
    there = Decoder(here.config, here.precision, device=CPU, placed=placed)
    for name in here.weight_names:
        writable(there.weight(name)).copy_(writable(here.weight(name)))
    return there


def splits(*names, of=MODELS):
    """Models whose first device has one layer, half of them or all; the others are exhaustive."""
    every = [
        name if name in names else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in of
    ]
    return in_turn(every, [*COUNTS])


def everything(decoder):
    """What prompts, steps, growing, restored, selected and rewound states give, and observers."""
    session = Session(decoder, 2, 12)
    found = [session.prefill(PROMPTS), *walked(session)[0]]
    seen, marks = {}, []
    name = f"blocks.{len(decoder.blocks) // 2}.resid_pre"
    edit = Edit(name=name, fn=lambda x, at: torch.where(((at == 1) | (at == 3))[:, None], 2 * x, x))
    found.append(decoder(ids(2, 9), logits="last", edits=[edit], clock=marks.append))
    found.append(decoder(ids(2, 9), tap=lambda name, tensor: seen.update({name: tensor.clone()})))
    found.append(decoder(ids(2, 9), until=0))
    return found, seen, marks


@pytest.mark.parametrize(("name", "first"), splits(*SHARING))
def test_the_bits_are_those_of_one_device(name, first):
    here = random_decoder(MODELS[name])
    there = split(here, SAME, COUNTS[first](len(here.blocks)))
    assert there.steps.off == "the layers are on several devices"
    (mine, seen, marks), (theirs, as_seen, as_marked) = everything(here), everything(there)
    assert all(map(torch.equal, mine, theirs))
    assert marks == as_marked
    assert seen.keys() == as_seen.keys()
    assert all(torch.equal(seen[name], as_seen[name]) for name in seen)


@pytest.mark.parametrize(("name", "first"), splits(*SHARING))
def test_nothing_meets_that_is_not_on_one_device(name, first, card):
    here = random_decoder(MODELS[name])
    there = split(here, CARD, count := COUNTS[first](len(here.blocks)))
    (mine, seen, _), (theirs, as_seen, _) = everything(here), everything(there)
    for one, other in zip([*mine, *seen.values()], [*theirs, *as_seen.values()], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-9, equal_nan=True)
    assert not any(isinstance(one, OnCard) for one in [*theirs, *as_seen.values()])
    kept = there.new_state(1, 4).layers
    where = [{isinstance(one, OnCard) for one in layer.tensors().values()} for layer in kept]
    assert all(one <= {at < count} for at, one in enumerate(where))


def test_the_clock_waits_for_the_device_of_a_layer(card, monkeypatch):
    there, log = split(random_decoder(MODELS["llama"]), CARD, 1), []
    monkeypatch.setattr("llmcli.nn.step.wait_for", lambda device: log.append(device))
    there(ids(1, 3), clock=log.append)
    marks = [name for name in log if name != CARD]
    waits = [name for before, name in pairwise(log) if before == CARD]
    assert waits == [name for name in marks if name.startswith("blocks.0.")]
    assert len(waits) > 10


@pytest.mark.parametrize(("name", "first"), splits(*VIEWED, of=SHARING))
def test_views_prove_the_layers_of_every_device(name, first, card):
    here = random_decoder(MODELS[name])
    model = as_model(split(here, CARD, COUNTS[first](len(here.blocks))))
    plan = plan_dump(model, known(model.config), 9)
    report = measure_dump(Passes(model, ids(1, 7)[0].tolist(), 2), plan)
    assert report.ok
    assert report.checks


NEEDS = [Need([4, 4, 4, 4], 8, 2), Need([5, 5, 5, 5], 9, 3), Need([6, 6, 6, 6], 10, 1)]


@pytest.mark.parametrize(
    ("free", "counts"),
    [
        ([26, 99, 99], [4]), ([None, 0, 0], [4]),  # the whole model
        ([25, 12, 11], [4, 0]), ([18, 12, 11], [4, 0]),  # all layers, and the rest on the next
        ([17, 17, 11], [3, 1]), ([10, 21, None], [2, 2, 0]), ([10, 22, None], [2, 2]),
        ([6, 8, 0], [1, 1, 2]), ([5, 99, 99], [0, 4]), ([1, 2, None], [0, 0, 4]),
        ([1, 2, 3], [0, 0, 4]),  # which does not fit and is refused
    ],
)  # fmt: skip
def test_each_device_is_filled_before_the_next(free, counts):
    assert layers_on(NEEDS, free) == counts


@pytest.mark.parametrize(
    ("placed", "home", "words"),
    [
        ("aabbb", "b", "a has layers 0–1 of 5, b the rest"),
        ("abbcc", "c", "a has layer 0 of 5, b layers 1–2, c the rest"),
        ("aab", "c", "a has layers 0–1 of 3, b layer 2, c the rest"),
        ("aa", "b", "a has layers 0–1 of 2, b the rest"), ("aa", "a", "a has the whole model"),
        ("bb", "b", "b has the whole model: no layer fits on a"),
        ("cc", "c", "c has the whole model: no layer fits on a or b"),
    ],
)  # fmt: skip
def test_words(placed, home, words):
    assert placement_words("abc", placed, home) == words


def test_lists_of_devices():
    assert listed("auto") == ("auto",)
    assert listed("cuda, cpu") == ("cuda:0", "cpu")
    assert listed("cuda:1,cuda:0,cpu") == ("cuda:1", "cuda:0", "cpu")
    for names in ("cpu,cuda:0", "cuda,cuda:0", "auto,cpu", "cuda:0,mps", "cuda:0,", "cpu,cpu", ","):
        with pytest.raises(UsageError, match="cannot be placed on the devices"):
            listed(names)


@pytest.fixture
def path(tmp_path):
    """A GGUF file of four layers in 8 bits: 33 KiB each, and 69 KiB besides, an untied head."""
    draw, tensors = torch.Generator().manual_seed(0), {}
    own = {name: shape for name, shape in shapes(64, 128).items() if name.startswith("blk.0.")}
    every = {name.replace("blk.0", f"blk.{i}"): own[name] for i in range(4) for name in own}
    for name, shape in {**shapes(64, 128), "output.weight": (256, 64), **every}.items():
        numbers = 0.2 * torch.randn(*shape, generator=draw)
        kind = 8 if len(shape) == 2 else 0
        raw = quantize(numbers, "Q8_0") if kind else numbers
        tensors[name] = (kind, raw.numpy().tobytes(), shape)
    sizes = {"embedding_length": 64, "feed_forward_length": 128, "block_count": 4}
    write_file(tmp_path / "model.gguf", metadata(**sizes), tensors)
    return tmp_path / "model.gguf"


def loaded(path, **options):
    return load_checkpoint(open_checkpoint(path), text=False, **{"device": "cuda,cpu"} | options)


def working_bytes(prepared):
    """Of activations and libraries on a card."""
    precision = prepared.precision("cuda", bfloat16=True)
    need = memory_need(PlannedRun(prepared.config, precision, batch=1, context=64, cuda=True))
    return need.prompt_bytes_estimate + need.runtime_bytes_estimate


@pytest.fixture
def room(path, card):
    """Free bytes of a card on which that many of the four layers fit, by their number."""
    found, prepared = {}, prepare(open_checkpoint(path))
    working = working_bytes(prepared)
    for free in range(working, working + 600_000, 50_000):
        card["cuda"] = free
        on = placed_on([CARD, CPU], prepared, 64)
        found.setdefault((on.placed.count("cuda:0"), on.home), free)
    assert [*found] == [(0, "cpu"), (1, "cpu"), (2, "cpu"), (3, "cpu"), (4, "cpu"), (4, "cuda:0")]
    return {layers: free for (layers, home), free in found.items() if home == "cpu"}


@pytest.mark.parametrize("layers", [0, 1, 4])
def test_a_file_is_read_into_both_memories(layers, path, room, card):
    """Blocks are dequantized on a card that has no kernels for them, and packed on the CPU."""
    card["cuda"] = room[layers]
    right, model = loaded(path, device="cpu"), loaded(path, context=64)
    decoder = model.decoder
    assert decoder.placed == (CARD,) * layers + (CPU,) * (4 - layers)
    assert model.describe()["device"] == ("cuda:0,cpu" if layers else "cpu")
    assert decoder.dtype == (torch.bfloat16 if layers else torch.float32)
    for i in range(4):
        weight = decoder.weight(f"blocks.{i}.mlp.W_up")
        assert isinstance(weight, Packed) == (i >= layers)
        assert isinstance(weight, Packed) or isinstance(weight.tensor, OnCard)
    assert isinstance(decoder.embed, Packed)
    specs = model.precision.parameters(model.config)
    assert model.weight_bytes == sum(spec.bytes for spec in specs)
    apart = [one.decoder(ids(1, 7)).log_softmax(-1) for one in (model, right)]
    assert torch.nn.functional.kl_div(*apart, log_target=True, reduction="sum") < 0.05


def test_blocks_are_packed_on_the_cpu_alone(path, card, monkeypatch):
    monkeypatch.setattr(native, "kernels_of", lambda kind: "triton" if kind == "cuda" else "avx2")
    card["cuda"] = working_bytes(prepare(open_checkpoint(path))) + 150_000
    model = loaded(path, context=64)
    count = model.decoder.placed.count(CARD)
    assert 0 < count < 4
    for i in range(4):
        weight = model.decoder.weight(f"blocks.{i}.mlp.W_up")
        assert type(weight) is (FileLayoutWeight if i < count else Packed)
    specs = model.precision.parameters(model.config)
    assert model.weight_bytes == sum(spec.bytes for spec in specs)
    assert model.precision.products == "int16"


def test_what_fits_neither_memory_is_refused_or_stays_in_the_file(path, room, card):
    card.update(cuda=room[2], cpu=60_000)
    mapped = loaded(path, context=64)
    assert 60_000 < mapped.mapped_bytes < mapped.weight_bytes
    card["cpu"] = 1 << 40
    both = [one.decoder(ids(1, 7)) for one in (mapped, loaded(path, context=64))]
    assert torch.equal(*both)
    card["cpu"] = 60_000
    with pytest.raises(OutOfMemory, match=r"0.1 MiB are free on `cpu`") as refused:
        loaded(path, dtype="float32", context=64)
    assert refused.value.code == 5
    left = f"the weights that do not fit on `cuda:0` ({devices.gib(room[2])} free) need "
    assert str(refused.value).startswith(left)
    card.update(cuda=room[2], cpu=1 << 40)
    model = loaded(path, context=64)
    with pytest.raises(OutOfMemory, match=r"the caches of 1 × 1000000 tokens need .* on `cuda:0`"):
        model.decoder.new_state(1, 1_000_000)
    session = Session(model.decoder, 1, 8)
    logits = session.prefill(PROMPTS[:1])
    card["cuda"] = 20_000  # 16 tokens take 8 KiB there
    with pytest.raises(OutOfMemory, match=r"the cache of 64 tokens need .* on `cuda:0`"):
        make_room(session, 64, 64, "a hint")
    assert session.state.capacity == 8
    assert session.logits_BV is logits
    request = TextRequest(prompts=PROMPTS[:1], sampling=Sampling(), samples=9, limit=2)
    with pytest.raises(OutOfMemory, match=r"the caches of 9 × \d+ tokens need .* on `cuda:0`"):
        next(stream(model, request))
    make_room(session, 16, 64, "a hint")


def test_only_a_model_on_one_device_is_captured_and_has_peers(path, room, card):
    whole = loaded(path).decoder
    assert (whole.devices, whole.fixed_shapes) == ((CARD,), True)
    placed = [CPU, *[CARD] * 3]
    assert not Decoder(whole.config, whole.precision, device=CARD, placed=placed).fixed_shapes
    card["cuda"] = room[4]
    model = loaded(path, context=64)
    assert loaded(path, context=1_000_000).decoder.devices == (CPU,)
    with pytest.raises(UsageError, match="only llmcli runs the layers of a model on `cuda:0,cpu`"):
        open_peer("transformers", model)


def test_random_weights_are_those_of_one_device(path, room, card):
    card["cuda"] = room[4]
    given = {"context": 64, "random_weights": 3, "dtype": "float32"}
    placed = loaded(path, **given).decoder
    assert placed.devices == (CARD, CPU)
    one = loaded(path, device="cpu", **given).decoder
    for name in one.weight_names:
        assert torch.equal(placed.weight(name).dense().cpu(), one.weight(name).dense())


def test_the_command_line(path, room, card, capsys):
    card["cuda"] = room[2]
    line = ["-m", str(path), "--ids", "1,2,3", "-n", "2", "--greedy", "--json", "-c", "64"]
    assert main(["generate", *line, "--device", "cuda:0,cpu"]) == 0
    said = capsys.readouterr()
    assert f"note: {path}: cuda:0 has layers 0–1 of 4, cpu the rest\n" in said.err
    document = json.loads(said.out)
    assert document["model"]["device"] == "cuda:0,cpu"
    assert document["model"]["weight_format"] == "bfloat16 + Q8_0"
    assert len(document["outputs"][0]["ids"]) == 2
    memory = f"{room[2] / 2**20:.3f}MiB"
    assert main(["info", *line[:2], "--memory", memory, *line[-3:], "--device", "cuda,cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["device"] == "cuda:0,cpu"
    assert main(["generate", *line, "--device", "cpu,cuda:0"]) == 2
    assert capsys.readouterr().err == (
        "error: layers cannot be placed on the devices `cpu,cuda:0`\n"
        "hint: name each CUDA device once, and cpu last: `--device cuda:0,cpu`\n"
    )
