"""The kernels of a card, where Triton is installed: in its interpreter, and compiled for cards.

Each in a process of its own: whether kernels are interpreted is settled when they are imported.
"""

import os
import re
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import children
import numpy
import pytest
import torch
import torch.nn.functional as F
from card import Card
from small_models import ids, random_decoder
from tensors import drawn
from test_gate import CAPACITY, LENGTH_ROPES, decoded, put, same, sessions
from zoo import MODELS

from llmcli.config.samples import GATED, OFFSET, block, branch, layer, llama, twice
from llmcli.decoder.block import Block
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.precision import Precision
from llmcli.kernels import native
from llmcli.nn.step import Edit
from llmcli.ops import on_card
from llmcli.ops.activations import activation as activation_of
from llmcli.ops.attention import attend, visible_keys
from llmcli.ops.norm import layer_norm, rms_norm
from llmcli.ops.rope import rotate
from llmcli.weights.dense import Dense
from llmcli.weights.routes import ExpertAssignment

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize(
    ("file", "interpreted"), [("triton_twins.py", "1"), ("triton_compiles.py", "0")]
)
def test_twins_and_targets(file, interpreted, tmp_path):
    import triton

    triton_is, numpy_is = (tuple(map(int, x.__version__.split(".")[:2])) for x in (triton, numpy))
    if interpreted == "1" and triton_is <= (3, 6) and numpy_is >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 and before fails with numpy 2.4 and later")
    paths = (str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))
    child = children.run(
        [sys.executable, "-m", "pytest", "-q", str(HERE / file)], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path),
             "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]


ALL = "attention, products, packed, sampling (checked when a model is loaded)"
SWITCHES = [
    ("", "", "", ALL),
    ("", "", "no C compiler", "no C compiler"),
    ("off", "", "", "off"),
    ("", "off", "", "off"),
    ("packed", "portable", "", "packed (checked when a model is loaded)"),
    ("products, attention", "", "", "products, attention (checked when a model is loaded)"),
    ("", "triton", "", UsageError("is not a level", hint="LLMCLI_TRITON selects them")),
    ("fast", "off", "", UsageError("`LLMCLI_TRITON=fast` does not name groups")),
    ("fast", "", "", UsageError("`LLMCLI_TRITON=fast` does not name groups of Triton's kernels")),
    ("packed", "", "not installed", UsageError("for `LLMCLI_TRITON=packed`: not installed")),
]


@pytest.mark.parametrize(("groups", "level", "lacks", "status"), SWITCHES)
def test_they_are_on_unless_they_are_switched_off(groups, level, lacks, status, monkeypatch):
    for variable, value in ((native.TRITON_VARIABLE, groups), (native.VARIABLE, level)):
        monkeypatch.setenv(variable, value)
    for name in ("_groups", "level"):
        monkeypatch.setattr(native, name, getattr(native, name).__wrapped__)
    monkeypatch.setattr(native, "_triton_lacks", lambda: lacks)
    monkeypatch.setattr(native, "TRITON_STATE", native.TritonState())
    if isinstance(status, UsageError):
        with pytest.raises(UsageError, match=status.message) as raised:
            native.check()
        assert (status.hint or "") in raised.value.hint
        return
    native.check()
    assert native.triton_status() == status
    assert native.kernels_of("cuda") == ("triton" if "packed" in status else None)
    native.TRITON_STATE.off = "wrong"
    assert native.triton() == ()
    assert native.kernels_of("cuda") is None


@pytest.mark.parametrize(
    ("tools", "lacks"),
    [("triton gcc", ""), ("triton", "no C compiler"), ("gcc", "not installed")],
)
def test_what_triton_needs(tools, lacks, monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(native, "find_spec", lambda name: name if name in tools.split() else None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools.split() else None)
    assert native._triton_lacks() == lacks
    (tmp_path / "Python.h").unlink()
    assert native._triton_lacks() == (lacks or f"no {tmp_path / 'Python.h'}")


def test_they_are_launched_on_the_device_of_their_input(monkeypatch):
    """It need not be the current one, which Triton takes."""
    inside, seen, x = [], [], torch.ones(1, 8)

    @contextmanager
    def current(device):
        inside.append(device)
        yield
        inside.pop()

    class Kernels:
        def __getattr__(self, name):
            def kernel(x):
                seen.append((name, inside == [x.device]))

            kernel.__name__ = name
            return kernel

    files = "attention", "experts", "heads", "packed", "products", "sampling"
    modules = SimpleNamespace(**{file: Kernels() for file in files})
    monkeypatch.setitem(sys.modules, "llmcli.kernels.triton", modules)
    monkeypatch.setattr(torch.cuda, "device", current)
    kernels = vars(on_card._kernels())
    for call in kernels.values():
        call(x)
    assert seen == [(name, True) for name in kernels]
    assert len(seen) == 9


@pytest.mark.parametrize(("capability", "sizes", "dtype", "taken"), [
    ((8, 0), (576, 512), torch.float16, True), ((7, 5), (576, 512), torch.float16, False),
    ((7, 5), (256, 256), torch.float16, True), ((9, 0), (577, 512), torch.float16, False),
    ((9, 0), (576, 513), torch.float16, False), ((9, 0), (256, 256), torch.float32, True),
    ((9, 0), (257, 32), torch.float32, False),
])  # fmt: skip
def test_heads_have_the_sizes_that_fit_shared_memory(capability, sizes, dtype, taken, monkeypatch):
    monkeypatch.setattr(on_card, "kernels", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with Card():
        k, v = (torch.zeros(1, 1, 3, size, dtype=dtype, device="cuda") for size in sizes)
        assert on_card.attends(k[:, :, :1], k, v) == taken


def attend_one(q, k, v, starts_B, *, scale, window, cap, sinks_H):
    assert q.dtype == k.dtype
    mask = visible_keys(starts_B.unsqueeze(1), k.shape[2], window).unsqueeze(1)
    return attend(q, k, v, scale=scale, mask=mask, cap=cap, sinks_H=sinks_H).contiguous()


def product(x, w, b, *, out, norm, gated, activation, onto):
    x = x.to(w.dtype) if norm is None else normalize(x, norm, w.dtype)
    y = F.linear(x.float(), w.float(), None if b is None else b.float())
    y, *up = y.split(len(w) // (1 + gated), -1)
    if activation is not None:
        y = activation_of(activation)(y.to(w.dtype)).float()
    if gated:
        y = y.to(w.dtype).float() * up[0].to(w.dtype).float()
    if onto is not None:
        stream, post, factor = onto
        y = y if post is None else normalize(y, post, torch.float32)
        y = y * factor + stream.view(y.shape)
    return y.to(out)


def normalize(x, norm, out):
    w, b, eps, kind, offset = norm
    if kind == 2:
        return layer_norm(x, w, b, eps, out, offset=offset)
    return rms_norm(x, w, eps, out, offset=offset)


def enter(x, heads, k, v, starts_B, *, dtype, norms, tables_CR):
    _, kv_heads, _, size = k.shape
    sizes = heads * size, kv_heads * size, kv_heads * v.shape[3]
    parts = zip(x[:, : sum(sizes)].split(sizes, 1), (heads, kv_heads, kv_heads), strict=True)
    q, keys, values = (one.unflatten(1, (1, number, -1)) for one, number in parts)
    assert all(kind == 1 for *_, kind, _ in norms)
    if norms:
        q, keys = (normalize(one, norm, dtype) for one, norm in zip((q, keys), norms, strict=True))
    if tables_CR is not None:
        tables = [table[starts_B, None, None] for table in tables_CR]
        q, keys = rotate(q, *tables), rotate(keys, *tables)
    rows = torch.arange(len(x))
    k[rows, :, starts_B], v[rows, :, starts_B] = keys[:, 0].to(k.dtype), values[:, 0].to(v.dtype)
    return q.transpose(1, 2).to(dtype)


def expert_product(x, w, pairs, b, *, out, activation=None):
    expert, row, each = pairs
    read = x[torch.arange(len(expert), device=x.device) // each if row is None else row]
    y = torch.bmm(w[expert], read.unsqueeze(2)).squeeze(2)
    y = y if b is None else y + b[expert]
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = activation_of(activation)(gate) * up
    return y.to(out)


def sum_experts(y, weight, rest):
    y = y if weight is None else y * weight.mT.unsqueeze(-1)
    return y.sum(1) + (0 if rest is None else rest)


def stand_ins(card):
    """Kernels made of PyTorch's operations; attention is a launch for the splits and one more."""
    functions = attend_one, enter, normalize, product, expert_product, sum_experts
    made = {one.__name__: card.kernel(one, 1 + (one is attend_one)) for one in functions}
    return SimpleNamespace(**made)


OWN = {
    "gemma": llama(*(
        block(
            branch(layer(window=window, cap=1.5, qk_norm=OFFSET).attention, OFFSET, OFFSET),
            branch(GATED, OFFSET, OFFSET),
        )
        for window in (None, 3)
    )),
    "clipped after norms of heads": twice(layer(clip=0.2, qk_norm=OFFSET)),
}  # fmt: skip
SEVEN = (
    "llama", "qk norm", "gemma", "gpt2", "gpt2 with relu and a window", "biases and relu",
    "partial rotation", "wide values", "caps", "sinks", "layers that differ", "offset norms",
    "norms after", "norms before and after", "parallel with one norm",
)  # fmt: skip
MORE = {
    "multipliers": 8, "blocks scaled by a parameter": 8, "one and three sublayers": 9, "chunks": 15,
}  # fmt: skip
OTHERS = (
    "gated attention", "clipped projections", "clipped after norms of heads", "clamped gates",
    "mamba-2", "latent attention", "keys and values of another layer",
    "experts beside the feed-forward", "qk layer norm", "qk norm over the width", "longrope",
)  # fmt: skip
EXPERTS = {
    "experts": 18, "weighted inputs of experts": 19, "experts with biases and clamped gates": 26,
    "experts without gates, alone in their blocks": 21,
}  # fmt: skip
# the most launches of a layer, if all its parts have kernels
LAUNCHES = dict.fromkeys(SEVEN, 7) | MORE | EXPERTS | dict.fromkeys(OTHERS)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_captured_step_has_them(name, monkeypatch):
    """That they are given what they need, and how many launches a layer has then."""
    config, counts, plain = (MODELS | OWN)[name], [], Block.__call__

    def marked(*args):
        before = len(card.launches or [])
        out = plain(*args)
        counts.append(len(card.launches or []) - before)
        return out

    here = random_decoder(config, torch.float32)
    with torch.inference_mode(), Card(float64=False) as card:
        kernels = stand_ins(card)
        monkeypatch.setattr(on_card, "kernels", lambda: kernels)
        both = sessions(here, put(here, card, torch.float32), [[5, 9, 2, 7], [3, 1]])
        ordinary, captured = both
        tokens = ids(2, 6)
        same(decoded(captured, tokens), decoded(ordinary, tokens), 1e-4)
        routed = {"expert_product", "sum_experts"} if name in EXPERTS else set()
        assert name in LENGTH_ROPES or {"attend_one", "product"} | routed <= set(card.launches)
        # what is observed is computed apart
        seen, marks = ({}, {}), ([], [])
        for session, tap, clock in zip(both, seen, marks, strict=True):
            decoded(session, tokens[:, :1], tap=tap.__setitem__)
            decoded(session, tokens[:, :1], clock=clock.append)
        assert [*seen[0]] == [*seen[1]]
        assert marks[0] == marks[1]
        same((one.cpu() for one in seen[1].values()), seen[0].values(), 1e-4)
        decoder = card.put(Decoder(config, Precision.of("bfloat16"), device="cuda"), CAPACITY)
        session = Session(decoder, 1, CAPACITY)
        monkeypatch.setattr(Block, "__call__", marked)
        decoded(session, tokens[:1, :2])
    if LAUNCHES[name] is not None:
        assert max(counts[-len(config.layers) :]) == LAUNCHES[name]


APART = {  # operations, and how many launches they are with 16-bit weights or heads, and in float32
    "rms": (lambda x, y, w, b, *tables: rms_norm(x, w, 1e-5, w.dtype), 2, 1),
    "rms, wide": (lambda x, y, w, b, *tables: rms_norm(x, w, 1e-5), 2, 1),
    "rms, offset": (lambda x, y, w, *rest: rms_norm(x, w, 1e-5, w.dtype, offset=1.0), 4, 2),
    "rms of each head": (
        lambda x, y, w, b, cos, sin: rms_norm(x[:, :, :2], cos[:, 0, 0], 1e-5, w.dtype), 2, 2,
    ),
    "layer": (lambda x, y, w, b, *tables: layer_norm(x, w, b, 1e-5, w.dtype), 2, 1),
    "layer, a bias alone": (
        lambda x, y, w, b, *tables: layer_norm(x, None, b, 1e-5, w.dtype), 2, 1,
    ),
    "layer, wide": (lambda x, y, w, b, *tables: layer_norm(x, w, b, 1e-5), 2, 1),
    "rotation": (lambda x, y, w, b, *tables: rotate(y, *tables), 3, 3),
    "rotation of a part": (lambda x, y, w, b, *tables: rotate(torch.cat((y, y), 3), *tables), 5, 5),
}


@pytest.mark.parametrize("name", APART)
def test_norms_and_rotations_are_few_launches_without_kernels(name):
    """16-bit numbers are not converted in launches of their own."""
    function, *counts = APART[name]
    for dtype, launches in zip((torch.bfloat16, torch.float32), counts, strict=True):
        x, tables = drawn(2, 1, 3, 8, seed=1), drawn(2, 2, 1, 1, 8, seed=4)
        w, b = (drawn(8, dtype=dtype, seed=seed) for seed in (2, 3))
        given = x, x.to(dtype), w, b, *tables
        want = function(*given)
        with torch.inference_mode(), Card() as card:
            there = [one.to("cuda") for one in given]
            with card.captured():
                found = function(*there)
            found = found.cpu()
        assert len(card.launches) == launches
        assert found.dtype == want.dtype
        rtol = 2e-6 if want.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found, want, rtol=rtol, atol=1e-6)


def test_edits_within_what_is_fused(monkeypatch):
    here = random_decoder(MODELS["llama"], torch.float32)
    with torch.inference_mode(), Card(float64=False) as card:
        kernels = stand_ins(card)
        monkeypatch.setattr(on_card, "kernels", lambda: kernels)
        both = sessions(here, put(here, card, torch.float32), [[5, 9, 2]])
        for leaf in ("ln1.out", "attn.k_rot", "attn_out", "mlp.act"):
            edits = [Edit(name=f"blocks.1.{leaf}", fn=lambda x, at: -2 * x)]
            edited = [decoded(one, ids(1, 2), edits=edits) for one in both]
            same(*edited, 1e-4)


@pytest.mark.parametrize(("wide", "dtype"), [(True, torch.float32), (False, torch.float16)])
def test_results_of_experts_are_wide_where_they_are_summed(wide, dtype, monkeypatch):
    monkeypatch.setattr(
        on_card, "kernels", lambda: SimpleNamespace(expert_product=expert_product)
    )
    with torch.inference_mode(), Card():
        x = torch.ones(1, 8, dtype=torch.float16, device="cuda")
        w_ENK = torch.ones(3, 4, 8, dtype=torch.float16, device="cuda")
        chosen_BTK = torch.zeros(1, 1, 2, dtype=torch.long, device="cuda")
        routes = ExpertAssignment.of(chosen_BTK, static=True)
        assert Dense(w_ENK).matmul_routed(x, routes, None, wide).dtype == dtype


calls = []


def wrong(*args, **rest):
    return 1.5 * product(*args, **rest)


def broken(*args, **rest):
    raise RuntimeError("no kernel image\nfor this device")


def full(*args, **rest):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def started(monkeypatch):
    """`started(product)`: sessions of a small model on both devices; the card has that product."""

    def start(product, dtype=torch.float32):
        def counted(*args, **rest):
            calls.append("product")
            return product(*args, **rest)

        made_of = stand_ins(card)
        made_of.product = card.kernel(counted)
        monkeypatch.setattr(on_card, "_kernels", lambda: made_of)
        here = random_decoder(MODELS["llama"], dtype)
        return sessions(here, put(here, card, dtype), [[5, 9, 2, 7], [3, 1]])

    monkeypatch.setattr(on_card, "kernels", on_card.kernels.__wrapped__)
    calls.clear()
    with torch.inference_mode(), Card() as card:
        start.notes = []
        native.TRITON_STATE.warn = start.notes.append
        yield start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (product, ""),
        (wrong, "their logits differ from PyTorch's by "),
        (broken, "`product` failed: no kernel image"),
    ],
)
def test_they_are_checked_before_anything_is_computed(kernel, why, dtype, started):
    """If they differ, PyTorch computes everything, and a note says so."""
    ordinary, captured = started(kernel, dtype)
    assert "product" in calls or kernel is not product
    calls.clear()
    tokens = ids(2, 4)
    narrow = dtype == torch.bfloat16
    same(decoded(captured, tokens), decoded(ordinary, tokens), 0.2 if narrow else 1e-4)
    assert set(captured.state.recorded) == {(1, 8)}
    assert bool(calls) == (not why)
    assert native.TRITON_STATE.checked == (not why)
    said = started.notes
    assert len(said) == bool(why)
    if why:
        assert native.TRITON_STATE.off.startswith(why)
        assert said[0] == f"Triton's kernels are off: {native.TRITON_STATE.off}"
    if kernel is wrong:
        bound = "nats, allowed 0.05" if narrow else "of the largest logit, allowed 5e-05"
        assert re.search(rf"by \d\S* {bound}$", said[0])


@pytest.mark.parametrize(
    ("without", "steps", "why"),
    [
        (torch.nan, torch.nan, ""),
        (1.0, torch.nan, "their logits differ from PyTorch's by nan of the largest logit"),
        (1.0, RuntimeError("illegal memory access"), "`a step` failed: illegal memory access"),
    ],
)
def test_numbers_that_are_not_finite_and_late_errors(without, steps, why, started):
    """A kernel's error may come after its launch; logits that have no numbers show nothing."""

    def logits():
        if not native.TRITON_STATE.off:
            if isinstance(steps, RuntimeError):
                raise steps
            return torch.full((3, 5), steps)
        return torch.full((3, 5), without)

    on_card.check(logits, torch.float32)
    assert native.TRITON_STATE.off.startswith(why)
    assert bool(native.TRITON_STATE.off) == len(started.notes) == bool(why)
    assert not native.TRITON_STATE.checked


def test_a_kernel_that_fails_in_a_capture(started):
    """The step is computed without it. Out of memory is no failure of a kernel."""
    ordinary, captured = started(product)
    made_of = on_card._kernels()
    tokens = ids(2, 4)
    same(decoded(captured, tokens[:, :1]), decoded(ordinary, tokens[:, :1]), 1e-4)
    made_of.product = full
    with pytest.raises(torch.OutOfMemoryError):
        decoded(captured, tokens[:, 1:2], tap=lambda name, tensor: None)
    assert not native.TRITON_STATE.off
    made_of.product = broken
    same(decoded(captured, tokens[:, 1:]), decoded(ordinary, tokens[:, 1:]), 1e-4)
    assert captured.decoder.steps.off == "the capture failed: `product` failed: no kernel image"
    assert len(started.notes) == 1
