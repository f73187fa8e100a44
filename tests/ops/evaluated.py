"""An op of `llmcli.graph.ops` evaluated on numbers that are given: the slow twin of a fast version.

Letters as in `llmcli.evaluate.rule`.
"""

import math
from itertools import product

import torch

from llmcli.config.attention import ScoreConfig
from llmcli.evaluate.rule import concatenated
from llmcli.evaluate.rules import RULES
from llmcli.graph import ops
from llmcli.graph.node import Node


class Given:
    """What a rule reads: rows of activations, and weights as the formula has them, by name."""

    eps = torch.finfo(torch.float64).eps

    def __init__(self, rows, weights=None, positions=None, length=None):
        self.rows, self.weights = rows, weights
        tokens = next(iter(rows.values())).shape[-2]
        self.positions = tuple(range(tokens) if positions is None else positions)
        self.alone = (False,) * tokens
        self.texts = ("",) * tokens
        self.sequence = tokens if length is None else length

    def __getitem__(self, name):
        return self.rows[name]

    def every(self, name, tokens=slice(None)):
        return self.rows[name][..., tokens, :]

    def weight(self, name):
        return self.weights[name]

    vector = weight

    def read(self, name, weight):
        """A product's input as its weight reads it: as it is, heads side by side."""
        return concatenated(self[name])

    def rounded(self, weight):
        return 0

    def size(self, name):
        return tuple(self.weights[name].shape)

    def columns(self, name, which):
        return self.weights[name][:, which]

    def length(self, position):
        return self.sequence


def rule(op, others=()):
    """Of an op, which may look at those of `others`, by name."""
    node = Node(name="out", letter="out", axes=(), op=op, words="", group="")
    found = {name: rule(other, others[:i]) for i, (name, other) in enumerate(others)}
    return RULES[type(op)](node, str, found)


def evaluate(op, rows, weights=None, *, positions=None, length=None, others=()):
    """The whole activation. `positions` of the rows and the `length` of all: those from 0 on."""
    return rule(op, others).tensor(Given(rows, weights, positions, length))


def derive(op, rows, weights=None, *, others=()):
    """The same of whole sequences, number by number, in Python's floats: what `explain` shows."""
    given, found = Given(rows, weights), rule(op, others)
    shape = found.tensor(given).shape
    numbers = [found.element(given, index).value for index in product(*map(range, shape))]
    return torch.tensor(numbers, dtype=torch.float64).view(shape)


def attention(q_HTd, k_KSd, v_KSe, *, scale, window=None, slow=evaluate):
    """`softmax(scale · Q Kᵀ + M) V`, `[H, T, e]`; keys stand at positions 0 to S - 1."""
    group = len(q_HTd) // len(k_KSd)
    score = ops.Score(
        query="q", key="k", head_dim=q_HTd.shape[-1], group=group, root="",
        config=ScoreConfig(scale=scale, window=window),
    )  # fmt: skip
    softmax = ops.Softmax(source="s")
    mix = ops.Mix(pattern="a", value="v", query="q", group=group, window=window)
    rows = {"q": q_HTd, "k": k_KSd, "v": v_KSe}
    rows["s"] = slow(score, rows)
    rows["a"] = slow(softmax, rows, others=(("s", score),))
    return slow(mix, rows, others=(("s", score), ("a", softmax)))


def project(x_TK, w_NK, heads=0):
    """`X W` of weights as torch has them, a row per output: `[T, N]`, or `[H, T, N/H]`."""
    op = ops.Project(source="x", weight="w", over="K", columns="N", heads=heads)
    return op, {"x": x_TK}, {"w": w_NK.t()}


def activated(function, x):
    """`Activation(X)` of any shape."""
    return evaluate(ops.Activate(source="x", function=function), {"x": x.reshape(1, -1)}).view(
        x.shape
    )


def softplus(x):
    """`log(1 + exp(x))` as `max(x, 0) + log(1 + exp(-|x|))`, which cannot overflow.

    That is x, to 2.1e-9, above 20, and exp(x), to a relative 1.1e-9, below -20.
    """
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def softmax(x):
    """Of a list of numbers."""
    row = torch.tensor([[x]], dtype=torch.float64)
    return evaluate(ops.Softmax(source="s"), {"s": row}).flatten().tolist()
