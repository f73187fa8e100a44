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
import pytest
import torch
import torch.nn.functional as F
from card import Card
from small_models import ids, random_decoder
from test_gate import decoded, put, same, sessions
from zoo import MODELS

from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.ops import on_card
from llmcli.ops.activations import activation as activation_of
from llmcli.ops.attention import attend, visible_keys

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize(
    ("file", "interpreted"), [("triton_twins.py", "1"), ("triton_compiles.py", "0")]
)
def test_twins_and_targets(file, interpreted, tmp_path):
    paths = (str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))
    child = children.run(
        [sys.executable, "-m", "pytest", "-q", str(HERE / file)], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path),
             "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]


ALL = "attention, products, packed (checked when a model is loaded)"
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

    modules = SimpleNamespace(attention=Kernels(), packed=Kernels(), products=Kernels())
    monkeypatch.setitem(sys.modules, "llmcli.kernels.triton", modules)
    monkeypatch.setattr(torch.cuda, "device", current)
    kernels = vars(on_card._kernels())
    for call in kernels.values():
        call(x)
    assert seen == [(name, True) for name in kernels]
    assert len(seen) == 5


def attend_one(q, k, v, starts_B, *, scale, window, cap, sinks_H):
    calls.append("attend")
    mask = visible_keys(starts_B.unsqueeze(1), k.shape[2], window).unsqueeze(1)
    return attend(q, k, v, scale=scale, mask=mask, cap=cap, sinks_H=sinks_H)


def product(x, w, b, *, out, activation=None):
    calls.append(activation or "product")
    y = F.linear(x, w, b)
    if activation is not None:
        gate, up = y.split(len(w) // 2, -1)
        y = activation_of(activation)(gate) * up
    return y.to(out)


def normalize(x, norm, out):
    calls.append("norm")
    w, b, eps, kind, offset = norm
    w = torch.ones(x.shape[1], device=x.device) if w is None else w.float() + offset
    if kind == 2:
        return F.layer_norm(x, w.shape, w, b, eps).to(out)
    return F.rms_norm(x, w.shape, w, eps).to(out)


calls = []


PLAIN = {"attend", "norm", "product"}
GATED = ("llama", "window", "chunks", "caps", "sinks")
OTHERS = ("gpt2", "keys and values of another layer", "mamba-2", "clamped gates")


@pytest.mark.parametrize("name", [*GATED, *OTHERS])
def test_a_captured_step_has_them(name, monkeypatch):
    """By stand-ins made of PyTorch's operations: that they are given what they need."""
    calls.clear()
    made_of = SimpleNamespace(attend_one=attend_one, normalize=normalize, product=product)
    monkeypatch.setattr(on_card, "kernels", lambda: made_of)
    here = random_decoder(MODELS[name], torch.float32)
    with torch.inference_mode(), Card(float64=False) as card:
        there = put(here, card, torch.float32)
        ordinary, captured = sessions(here, there, [[5, 9, 2, 7], [3, 1]])
        tokens = ids(2, 6)
        same(decoded(captured, tokens), decoded(ordinary, tokens), 1e-4)
        assert PLAIN | ({"silu"} if name in GATED else set()) <= set(calls)
        calls.clear()
        seen = {}
        decoded(captured, tokens[:, :1], tap=seen.__setitem__)
        # what is within the gated one is shown
        assert not set(calls) - PLAIN
        assert "blocks.0.attn.q" in seen or name == "mamba-2"


def wrong(x, w, b, *, out, activation=None):
    return 1.5 * product(x, w, b, out=out, activation=activation)


def broken(*args, **rest):
    raise RuntimeError("no kernel image\nfor this device")


def full(*args, **rest):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def started(monkeypatch):
    """`started(product)`: sessions of a small model on both devices; the card has that product."""

    def start(product, dtype=torch.float32):
        made_of = SimpleNamespace(
            attend_one=attend_one, normalize=normalize, product=product, packed_product=broken,
            routed_product=broken,
        )  # fmt: skip
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
