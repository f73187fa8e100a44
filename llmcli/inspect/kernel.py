"""What the fast kernel computed, as the rules read it: rows of every activation, in float64."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmcli.config.model import ModelConfig
from llmcli.decoder.block import Mixer
from llmcli.errors import UsageError
from llmcli.evaluate import rules as evaluation
from llmcli.evaluate.rule import Rule, concatenated, exact, settled
from llmcli.graph.graph import graph
from llmcli.graph.ops import HeadShare, Project
from llmcli.graph.routing import ExpertProject
from llmcli.model import Model
from llmcli.ops.linear import rounds_sums
from llmcli.records.numbers import together
from llmcli.weights.packed import Packed


@lru_cache(maxsize=8)  # a view asks layer by layer
def rules(config: ModelConfig) -> Mapping[str, Rule[Any]]:
    """The rule of every activation of a model by its name, in execution order."""
    model = graph(config)
    return evaluation.rules(model.nodes.values(), model.letter)


class Kernel:
    """Activations of `ids` by name, float64 on the CPU, without a batch axis.

    `kernel[name]` has the rows of the tokens at `positions`. `emitted` (without a batch axis) ends
    with the last token; a tensor may begin at a later one than the first. The first
    `prompt_tokens` were computed in one call, every other one in a call of its own. `alone` says
    for every position whether its row was the only one that the formula in question was given.
    By default there are the rows of all tokens, computed in one call; a single row was alone.
    `weights`: the model whose parameters the formulas have, if another one than the kernel's.
    """

    def __init__(
        self,
        model: Model,
        rules: Mapping[str, Rule[Any]],
        ids: Sequence[int],
        texts: Sequence[str] = (),
        *,
        emitted: Mapping[str, Tensor],
        positions: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        alone: Sequence[bool] | None = None,
        weights: Model | None = None,
    ) -> None:
        self.model = model
        self.weights = weights or model
        self.rules = rules
        self.graph = graph(model.config)
        self.ids = tuple(ids)
        self.texts = tuple(texts)
        self.emitted = emitted
        self.positions = tuple(range(len(ids)) if positions is None else positions)
        self.prompt_tokens = len(ids) if prompt_tokens is None else prompt_tokens
        rows = len(self.positions)
        self.alone = (rows == 1,) * rows if alone is None else tuple(alone)
        found, wide = torch.finfo(model.dtype), torch.finfo(torch.float32)
        self.dtype = model.dtype  # the arithmetic of the decoder
        self.eps: float = found.eps
        # The magnitude whose roundings (eps of it) are what a kernel may take for 0: below it they
        # get no smaller. 16 bits have subnormal numbers, but sums are taken in float32.
        narrow = model.dtype.itemsize < torch.float32.itemsize
        self.least: float = found.tiny + wide.tiny / found.eps if narrow else found.tiny / found.eps
        # keys and values that are rounded to another dtype than all else
        rounded = model.decoder.cache_dtype != model.dtype
        states = self.graph.states.values() if rounded else ()
        self._cached = frozenset(state.holds for state in states if state.cached)

    @staticmethod
    def of(other: Kernel, positions: Sequence[int], alone: Sequence[bool]) -> Kernel:
        """The kernel's own numbers as `other` has them, at `positions`."""
        return Kernel(
            other.model,
            other.rules,
            other.ids,
            other.texts,
            emitted=other.emitted,
            positions=positions,
            prompt_tokens=other.prompt_tokens,
            alone=alone,
            weights=other.weights,
        )

    def at(self, position: int) -> Kernel:
        """The kernel's own numbers of one of the tokens."""
        return Kernel.of(self, [position], [self.alone[self.positions.index(position)]])

    def __getitem__(self, name: str) -> Tensor:
        """The input of a formula: written by the kernel, or derived from what it wrote."""
        node = self.graph[name]
        stored = name in self.emitted or self.graph.written(name)  # an edited one is emitted
        if not stored and not isinstance(node.op, HeadShare):
            return self.rules[name].tensor(self)
        return self.kernel(name)

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """All its rows, or `rows`, independent of `positions`: keys and values."""
        return exact(self.emitted[name][..., rows, :])

    def read(self, name: str, weight: str) -> Tensor:
        """The input of a product as its kernel reads it, `[T, K]`; heads stand side by side."""
        return self._seen(concatenated(self[name]), weight)

    def _seen(self, x_TK: Tensor, weight: str) -> Tensor:
        """See `Weight.quantized_input`; a dense weight reads `x_TK` itself."""
        if not self.rounded(weight):
            return x_TK
        matrix = self.model.decoder.weight(weight)
        return exact(matrix.quantized_input(x_TK.to(self.model.device, torch.float32)))

    def rounded(self, weight: str) -> int:
        """To how many bits the input of products with that matrix is rounded; 0: to none."""
        matrix = self.model.decoder.weight(weight)
        return 8 * matrix.digits if isinstance(matrix, Packed) else 0

    def is_kept(self, name: str) -> bool:
        """Whether a cache keeps that activation in another dtype than it is computed in."""
        return name in self._cached

    def as_kept(self, name: str, x: Tensor, theirs: Tensor, off: Tensor | float) -> Tensor:
        """What `x`, numbers of that activation, is in the dtype that a cache keeps it in.

        `theirs` are the kernel's numbers, from which those may differ by `off` before.
        """
        if not self.is_kept(name):
            return x
        return settled(x, x.to(self.model.decoder.cache_dtype).to(x.dtype), theirs, off)

    def dtype_of(self, name: str) -> torch.dtype:
        """What the decoder rounds it to, which may be less than what it is kept in.

        Before a cache rounds it once more (`as_kept`).
        """
        model, node = self.model, self.graph[name]
        # a product's sums, or a copy of its rows; the head's are never rounded
        widened = (
            isinstance(node.op, Project | ExpertProject)
            and node.group != "head"
            and (rounds_sums(self.device(name), model.dtype) or self.graph[node.op.source].wide)
        )
        return model.stream_dtype if node.wide and not widened else model.dtype

    def device(self, name: str) -> torch.device:
        """Where the decoder computed it."""
        decoder, layer = self.model.decoder, self.graph[name].layer
        return decoder.device if layer is None else decoder.placed[layer]

    def origin(self, name: str) -> str:
        """Where a parameter comes from."""
        return origin(self.model, name)

    def length(self, position: int) -> int:
        """How long the sequence was when the token at `position` was computed."""
        return max(self.prompt_tokens, position + 1)

    def kernel(self, name: str, *index: int) -> Tensor:
        """What the decoder computed, or the row or number of it with that index."""
        return exact(self._written(name)[index])

    def _written(self, name: str) -> Tensor:
        """As the tap saw it, or as the mixer computes it from what the tap saw."""
        if name in self.emitted:
            tensor = self.emitted[name]
            if (rows := tensor.shape[-2]) == len(self.positions):
                return tensor
            missing = len(self.ids) - rows
            chosen = torch.tensor([at - missing for at in self.positions], device=tensor.device)
            return tensor.index_select(-2, chosen)
        if name not in self.graph or self.graph.written(name):
            raise KeyError(name)
        mixer = mixer_of(self.model, name)
        emitted = {one: self.emitted[one][None] for one in self.graph.sources(name)}
        each = [mixer.derive(name, emitted, at[0], at[-1] + 1)[0] for at in _runs(self.positions)]
        return each[0] if len(each) == 1 else torch.cat(each, dim=-2)

    def weight(self, name: str) -> Tensor:
        """A parameter in the formula's orientation (`Q = T W_q`), in its own dtype and place."""
        stored = self.weights.decoder.weight(name).dense()
        return stored.mT if self._turned(name) else stored

    def _turned(self, name: str) -> bool:
        row = self.graph.parameters.get(name)  # none of a tied head, which is the table turned
        return row is None or row.transposed

    def columns(self, name: str, which: slice) -> Tensor:
        """Some columns of a matrix, `[K, n]`: float64 on the CPU, a copy."""
        assert self._turned(name)
        return exact(self.weights.decoder.weight(name).dense(rows=which)).mT

    def size(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        columns, rows = self.weights.decoder.weight(name).shape
        return rows, columns

    def expert(self, name: str, expert: int) -> Tensor:
        """The matrix of one expert, `[K, N]`: float64 on the CPU, a copy."""
        assert self._turned(name)
        return exact(self.weights.decoder.weight(name).dense(rows=slice(expert, expert + 1))[0]).mT

    def uncertainty(self, name: str, magnitude: Tensor) -> Tensor:
        """None: the inputs are the kernel's."""
        return torch.zeros_like(magnitude)

    def table_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a table, float64 on the CPU."""
        ids = torch.tensor(rows, device=self.weights.device)
        return exact(self.weights.decoder.weight(name).rows(ids))

    def vector(self, name: str) -> Tensor:
        """A parameter that is a vector, float64 on the CPU."""
        return exact(self.weight(name))


def _runs(positions: Sequence[int]) -> list[Sequence[int]]:
    """Ascending positions, cut where one is left out."""
    ends = [at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1]
    return [positions[a:b] for a, b in pairwise([0, *ends, len(positions)])]


def edited(model: Model) -> frozenset[str]:
    """The activations that the model's edits change: no formula gives them.

    With those that are another name of one, as a block's input is of the output before it, and
    those computed from edited ones that no kernel writes: mixed values, of an edited map.
    """
    whole, found = graph(model.config), {edit.name for edit in model.decoder.edits}
    for node in whole.nodes.values() if found else ():
        unwritten = (one for one in node.op.inputs if not whole.written(one))
        if node.shares in found or not found.isdisjoint(unwritten):
            found.add(node.name)
    return frozenset(found)


def refuse_edited(model: Model, names: Collection[str]) -> None:
    """Raises UsageError for edits of maps that a look computes from queries and keys."""
    for name in edited(model).intersection(names):
        raise UsageError(
            f"`{name}` is computed here from queries and keys, without its edit",
            hint="`lens`, `score` and `generate` show what follows from the edit",
        )


def mixer_of(model: Model, name: str) -> Mixer:
    """The mixer that an activation is of, with its parameters where the tap's activations are."""
    layer = layer_of(name)
    assert layer is not None
    block = model.decoder.blocks[layer]
    mixer: Any = block.parts[name.rpartition(".")[0]]
    found: Mixer = mixer if block.device == model.device else _copied(mixer, model.device)
    return found


@lru_cache(maxsize=1)
def _copied(mixer: Any, device: torch.device) -> Any:
    with _Copying(device):
        return deepcopy(mixer)


class _Copying(TorchFunctionMode):
    """Copies of tensors (`copy.deepcopy`) are on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].to(self._device)
        return func(*args, **(kwargs or {}))


def layer_of(name: str) -> int | None:
    """The block whose activation it is."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def last_layer(names: Iterable[str]) -> int | None:
    """The last block that has to be run for activations, None for the whole model."""
    layers = [0 if one in ("embed", "pos_embed") else layer_of(one) for one in names]
    numbers = [layer for layer in layers if layer is not None]
    return max(numbers) if len(numbers) == len(layers) else None


def origin(model: Model, parameter: str) -> str:
    """Which tensor of the checkpoint a parameter was read from, and what was done to it."""
    if model.random_seed is not None:
        return f"drawn at random with the seed {model.random_seed}"
    entries = [entry for entry in model.ledger.entries if entry.target == parameter]
    if not entries:
        return "read from the checkpoint"
    entry, source = entries[0], together([entry.source for entry in entries])
    words = f"from the checkpoint's `{source}`, stored as {entry.stored}"
    if entry.dequantized:
        words += " and dequantized"
    return words + (f" ({', '.join(entry.operations)})" if entry.operations else "")
