"""The kernels of a card, where Triton is installed: in its interpreter, and compiled for cards.

Each in a process of its own: whether kernels are interpreted is settled when they are imported.
"""

import os
import sys
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
from llmcli.weights.dense import Dense
from llmcli.weights.routes import ExpertAssignment

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


def test_they_are_off_unless_they_are_wanted(monkeypatch):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert on_card.kernels.__wrapped__() is None
    monkeypatch.setenv(native.VARIABLE, "triton")
    assert native.wants_triton()
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="there is no Triton for `LLMCLI_KERNELS=triton`"):
        native.check()


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
    calls.append("attend latents" if v.shape[3] < k.shape[3] else "attend")
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
    w = torch.ones(x.shape[1], device=x.device) if w is None else w + offset
    if kind == 2:
        return F.layer_norm(x, w.shape, w, b, eps).to(out)
    return F.rms_norm(x, w.shape, w, eps).to(out)


def expert_product(x, w, pairs, b, *, out, activation=None):
    calls.append(f"experts {activation or 'product'}")
    expert, row, each = pairs
    read = x[torch.arange(len(expert), device=x.device) // each if row is None else row]
    y = torch.bmm(w[expert], read.unsqueeze(2)).squeeze(2)
    y = y if b is None else y + b[expert]
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = activation_of(activation)(gate) * up
    return y.to(out)


def sum_experts(y, weight, rest):
    calls.append("sum")
    y = y if weight is None else y * weight.mT.unsqueeze(-1)
    return y.sum(1) + (0 if rest is None else rest)


calls = []


PLAIN = {"attend", "norm", "product"}
ROUTED = {"experts product", "sum"}
GATED = ("llama", "window", "chunks", "caps", "sinks", "latent attention")
OTHERS = ("gpt2", "keys and values of another layer", "mamba-2", "clamped gates")
EXPERTS = {
    "experts": "experts silu", "weighted inputs of experts": "experts silu",
    "experts with biases and clamped gates": "sum",
    "experts without gates, alone in their blocks": "sum",
}  # fmt: skip


@pytest.mark.parametrize("name", [*GATED, *OTHERS, *EXPERTS])
def test_a_captured_step_has_them(name, monkeypatch):
    """By stand-ins made of PyTorch's operations: that they are given what they need."""
    calls.clear()
    made_of = SimpleNamespace(
        attend_one=attend_one, normalize=normalize, product=product,
        expert_product=expert_product, sum_experts=sum_experts,
    )  # fmt: skip
    monkeypatch.setattr(on_card, "kernels", lambda: made_of)
    here = random_decoder(MODELS[name], torch.float32)
    with torch.inference_mode(), Card(float64=False) as card:
        there = put(here, card, torch.float32)
        ordinary, captured = sessions(here, there, [[5, 9, 2, 7], [3, 1]])
        tokens = ids(2, 6)
        same(decoded(captured, tokens), decoded(ordinary, tokens), 1e-4)
        routed = {EXPERTS[name], *ROUTED} if name in EXPERTS else set()
        latents = {"attend latents"} if name == "latent attention" else set()
        assert PLAIN | routed | latents | ({"silu"} if name in GATED else set()) <= set(calls)
        calls.clear()
        seen = {}
        decoded(captured, tokens[:, :1], tap=seen.__setitem__)
        # what is within the gated one is shown
        assert not set(calls) - PLAIN - ROUTED - latents
        assert "blocks.0.attn.q" in seen or name == "mamba-2"


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
