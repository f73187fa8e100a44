"""Every worked number of the operations reference, evaluated slowly and as the model runs it.

Those of sampling are in tests/engine/test_sampling.py.
"""

import importlib
import math
import re

import pytest
import torch
from evaluated import activated, attention, derive, evaluate, project, softmax, softplus
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import layer, llama

from llmcli import ops
from llmcli.config.attention import ScoreConfig
from llmcli.config.embedding import HeadConfig
from llmcli.config.norm import NormConfig
from llmcli.decoder.decoder import Decoder
from llmcli.evaluate.rules import RULES
from llmcli.graph.ops import Gate, Normalize, Scale, Score
from llmcli.graph.plan import parameters
from llmcli.graph.precision import Precision
from llmcli.ops import activations, norm
from llmcli.ops.attention import attend, scores
from llmcli.ops.linear import linear

F64 = torch.float64
X = [1.0, 2.0, 3.0, 4.0]
W_Q = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]]
W_K = [[0.2, 0.3, 0.4, 0.5], [0.6, 0.7, 0.8, 0.9], [1.0, 1.1, 1.2, 1.3]]
W_V = [[0.3, 0.4, 0.5, 0.6], [0.7, 0.8, 0.9, 1.0], [1.1, 1.2, 1.3, 1.4]]
PROJECTED = {"q": [3.0, 7.0, 11.0], "k": [4.0, 8.0, 12.0], "v": [5.0, 9.0, 13.0]}
LOGITS = [2.0, 1.0, 0.1]


def tensor(values):
    return torch.tensor(values, dtype=F64)


def rounded(values, digits):
    return [round(v, digits) for v in values]


def test_projections():
    for letter, w in zip("qkv", (W_Q, W_K, W_V), strict=True):
        for slow in (evaluate, derive):
            out = slow(*project(tensor([X]), tensor(w)))[0].tolist()
            assert out == pytest.approx(PROJECTED[letter])
    # the model's way: one product with the three stacked, cut apart afterwards
    fused = linear(tensor([X]), tensor(W_Q + W_K + W_V), None)[0].split(3)
    for out, expected in zip(fused, PROJECTED.values(), strict=True):
        assert out.tolist() == pytest.approx(expected)


def test_score():
    q, k = PROJECTED["q"], PROJECTED["k"]
    rows = {"q": tensor([q]), "k": tensor([k])}
    heads = {name: row[None] for name, row in rows.items()}
    plain = ScoreConfig(scale=3**-0.5)
    score = Score(query="q", key="k", config=plain, head_dim=3, group=1, root="√3")
    for slow in (evaluate, derive):
        assert slow(*project(rows["q"], rows["k"])).item() == 200  # 12 + 56 + 132
        assert slow(Gate(act="q", up="k"), rows)[0].tolist() == [12, 56, 132]
        assert slow(score, heads).item() == pytest.approx(115.47, abs=0.001)  # "≈ 115.5"
    fast = scores(
        tensor(q).view(1, 1, 1, 3), tensor(k).view(1, 1, 1, 3), torch.ones(1, 1).bool(),
        scale=3**-0.5,
    )  # fmt: skip
    assert fast.item() == pytest.approx(200 / math.sqrt(3))


def test_one_token_attends_to_itself_whatever_its_score():
    q, k, v = (tensor(PROJECTED[letter]).view(1, 1, 1, 3) for letter in "qkv")
    assert attend(q, k, v, scale=3**-0.5).flatten().tolist() == PROJECTED["v"]
    for slow in (evaluate, derive):
        rows = (slow(*project(tensor([X]), tensor(w), heads=1)) for w in (W_Q, W_K, W_V))
        mixed = attention(*rows, scale=3**-0.5, slow=slow)
        out = slow(*project(mixed, torch.eye(3, dtype=F64)))
        assert out[0].tolist() == pytest.approx(PROJECTED["v"])


def test_softmax():
    powers = [math.exp(x) for x in LOGITS]
    assert rounded(powers, 2) == [7.39, 2.72, 1.11]
    assert round(sum(powers), 2) == 11.21  # the document adds the rounded numbers: 11.22
    assert rounded(softmax(LOGITS), 2) == [0.66, 0.24, 0.10]
    assert sum(softmax(LOGITS)) == pytest.approx(1)
    with pytest.raises(OverflowError):
        math.exp(1001.0)
    assert softmax([x + 1000 for x in LOGITS]) == pytest.approx(softmax(LOGITS))


def test_rms_norm():
    x, ones = [2.0, 4.0, 4.0], [1.0, 1.0, 1.0]
    given = {"x": tensor([x])}, {"w": tensor(ones)}
    rms = NormConfig(kind="rms", eps=1e-6)
    for slow in (evaluate, derive):
        assert round(slow(Scale(source="x", norm=rms), *given).item(), 3) == 3.464
    assert round(norm.rms_scale(tensor(x), 1e-6).item(), 3) == 3.464
    fast = norm.rms_norm(tensor(x), tensor(ones), 1e-6).tolist()
    op = Normalize(source="x", norm=rms, weight="w")
    for out in (fast, *(slow(op, *given)[0].tolist() for slow in (evaluate, derive))):
        assert rounded(out, 3) == [0.577, 1.155, 1.155]


def test_silu_has_a_minimum_and_nears_the_line():
    def silu(x):
        return activated("silu", tensor(x)).item()

    x = -torch.arange(5000, dtype=F64) / 1000
    lowest = min(zip(activated("silu", x).tolist(), x.tolist(), strict=True))
    assert lowest == pytest.approx((-0.2785, -1.278), abs=1e-4)  # no S-curve: it rises again
    assert silu(-20.0) > lowest[0] / 1000
    assert silu(3.0) == pytest.approx(3, abs=0.15)
    assert silu(8.0) == pytest.approx(8, abs=0.003)


def test_gelu_is_x_times_the_cdf_and_its_tanh_form_is_near_that():
    x = torch.arange(-600, 601, dtype=F64) / 100
    errors = (activated("gelu_tanh", x) - activated("gelu", x)).abs()
    assert 1e-4 < errors.max() < 5e-4
    at_2 = activated("gelu", tensor(2.0)).item()
    assert at_2 == pytest.approx(2 * 0.9772, abs=1e-3)  # not 0.9772, the CDF at 2


def test_softplus_and_its_approximations():
    for x in (20.001, 25.0, 700.0, 1e4):
        assert softplus(x) - x == pytest.approx(0, abs=2.1e-9)
        assert activations.softplus(tensor(x)).item() == x
    for x in (-20.001, -50.0, -700.0):
        assert softplus(x) == pytest.approx(math.exp(x), rel=1.1e-9)
        assert activations.softplus(tensor(x)).item() == pytest.approx(math.exp(x), rel=1.1e-9)
    # the decay exp(-dt · A) lies in (0, 1) because dt is positive and A is
    assert all(0 < math.exp(-softplus(x) * 0.5) < 1 for x in (-30.0, 0.0, 30.0))


class Products(TorchDispatchMode):
    """The shapes `[N, K]` of the matrices that something is multiplied with."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.linear.default:
            self.shapes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tied", [False, True])
def test_gemvs_of_one_token(tied):
    """ "~210" is 197 with W_o, 169 without, and 113 products when q|k|v and gate|up are fused."""
    model = llama(*(layer(),) * 28, vocab=99, head=HeadConfig(tied=tied))
    matrices = [s.name for s in parameters(model) if ".W" in s.name and s.name != "embed.W"]
    gemvs = len(matrices) + tied  # a tied head multiplies with the embeddings
    assert gemvs == 28 * 7 + 1 == 197
    assert gemvs - sum(name.endswith("W_o") for name in matrices) == 28 * 6 + 1 == 169
    decoder = Decoder(model, Precision.of("float32"), device="meta")
    state = decoder.new_state(1, 8)
    with Products() as products:
        decoder(torch.zeros(1, 1, dtype=torch.long, device="meta"), state)
    assert len(products.shapes) == 28 * 4 + 1 == 113
    assert max(products.shapes) == products.shapes[-1] == (99, 16)  # the logits, of the vocabulary


# a row of a table, a part of a product, numbers behind each other, some of a row, no formula
ELSEWHERE = {"LookUp", "HeadShare", "Join", "Cut", "Opaque"}


def test_the_table_of_operations_names_what_is_there():
    table = (ops.__doc__ or "").split("used by\n")[1].split("\n\n")[0]
    operations, fast, evaluated, _ = zip(
        *(re.split(r"\s{2,}", line) for line in table.splitlines()[1:]), strict=True
    )
    assert len(operations) == len(set(operations)) > 40
    names = {word for cell in evaluated for word in re.findall(r"[A-Z]\w+", cell)}
    assert names == {op.__name__ for op in RULES} - ELSEWHERE
    functions = set(re.findall(r"\b\w+(?:\.\w+)+", " ".join(fast)))
    assert len(functions) > 20
    for name in functions:
        module, _, function = name.rpartition(".")
        if module != "torch":
            inside = module if module.split(".")[0] in ("engine", "parts") else f"ops.{module}"
            assert callable(getattr(importlib.import_module(f"llmcli.{inside}"), function))
        else:
            assert callable(getattr(torch, function))
