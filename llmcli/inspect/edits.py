"""Applies the edits of `--edit` (`graph.edited`) to every pass of a model.

Axes: B batch, T new tokens of a call, N tokens of another run or an array; others as the graph's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.checkpoints.safetensors import read_safetensors
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.decoder.decoder import check_edits
from llmcli.errors import UsageError
from llmcli.graph.edited import TOKENS, EditRequest, Places, from_start
from llmcli.model import Model
from llmcli.nn.step import Edit
from llmcli.ops.quant.decode import PLAIN
from llmcli.records.numbers import counted
from llmcli.shell.documents import read_text
from llmcli.shell.prompts import need_tokenizer

Ids = Sequence[int]


def apply_edits(model: Model, prompts: Sequence[Ids]) -> None:
    """From now on every pass of the model has its `edits`; positions are those of `prompts`.

    What `mean` and `from` need is computed by passes over their prompts without any edit. Raises
    UsageError for what does not fit the prompts or the activations, and for files that cannot be
    read.
    """
    model.decoder.edits, model.changed = (), {}
    check_edits(model.config, [name for request in model.edits for name in request.places])
    found = []
    for request in model.edits:
        if request.of_prompt and len(prompts) != 1:
            raise UsageError(
                f"`--edit {request.text}` depends on the prompt, which has to be the only one",
                hint="count positions from the start, or take numbers from a file",
            )
        for name in request.places:
            if name.endswith("expert_idx") and request.verb not in ("zero", "from"):
                raise UsageError(
                    f"`{name}` are numbers of experts: `{request.verb}` makes no such numbers",
                    hint="use `zero` or `from`, or edit `expert_weight`",
                )
        model.changed[request.text] = False
        prompt = prompts[0] if len(prompts) == 1 else ()
        tokens, other, values = len(prompt), len(prompt), {}
        if request.path and request.verb != "mean":
            values = dict.fromkeys(request.places, _array(request))
        elif request.verb in ("mean", "from"):
            runs = _runs(request, model, prompt)
            values = emitted(model, runs, request.places, mean=request.verb == "mean")
            other = len(runs[0]) if request.prompt is not None else tokens
        for name, places in request.places.items():
            here, there = (_known(places, size, request) for size in (tokens, other))
            shift = _shift(here, there, request) if other != tokens else 0
            change = _Change(request, name, here, values.get(name), shift, model.changed)
            found.append(Edit(name=name, fn=change))
    model.decoder.edits = tuple(found)


def _known(places: Places, tokens: int, request: EditRequest) -> Places:
    """The places with positions of tokens from the start. Raises UsageError for those before it."""
    found = []
    for axis, span in places:
        first, last = from_start(span, tokens) if axis in TOKENS else span
        if min(first or 0, last or 0) < 0 or (first is not None and first == last):
            raise UsageError(
                f"`--edit {request.text}`: the prompt has {counted(tokens, 'token')}",
                hint=f"positions go from 0 to {tokens - 1}; -1 is the last",
            )
        found.append((axis, (first, last)))
    return tuple(found)


def _shift(here: Places, there: Places, request: EditRequest) -> int:
    """How many tokens later the same place is in another prompt, of another length."""
    first, first_there = dict(here)["T"][0], dict(there)["T"][0]
    if first is None or first_there is None or "S" in dict(here):
        raise UsageError(
            f"`--edit {request.text}`: the prompts have different numbers of tokens",
            hint="say which tokens, such as T=-1 or T=2:5",
        )
    return first_there - first


def _runs(request: EditRequest, model: Model, ids: Ids) -> list[Ids]:
    """The tokens of the prompts that `mean` and `from` read."""
    if request.prompt is None and not request.path:
        return [ids]
    prompt = request.prompt
    texts = read_text(request.path).split("\n") if prompt is None else [prompt]
    tokenizer = need_tokenizer(model.tokenizer, model.name)
    found = [tokenizer.encode(text) for text in texts if text]
    if not all(found) or not found:
        raise UsageError(f"`--edit {request.text}`: there is no text", hint="give a prompt")
    return list(found)


def emitted(
    model: Model, runs: Sequence[Ids], names: Collection[str], *, mean: bool
) -> dict[str, Tensor]:
    """Activations of these runs, without a batch axis; `mean`: of all their tokens, `[…, 1, …]`.

    Those that fused kernels do not store, too.
    """
    same = [Edit(name=name, fn=lambda x, positions: x) for name in names]
    found: dict[str, Tensor] = {}

    def tap(name: str, tensor: Tensor) -> None:
        if name in names:
            now = tensor[0].sum(-2, keepdim=True, dtype=torch.float64) if mean else tensor[0]
            found[name] = found[name] + now if name in found else now

    for ids in runs:
        model.decoder(torch.tensor([ids], device=model.device), tap=tap, edits=same)
    total = sum(map(len, runs))
    return {name: value / total if mean else value for name, value in found.items()}


def _array(request: EditRequest) -> Tensor:
    """The array of a file. Raises UsageError."""
    path, hint = request.path, "numpy's .npy and .npz, and .safetensors are read"
    try:
        if path.endswith(".safetensors"):
            arrays: Mapping[str, Any] = read_safetensors(Path(path))[1]
        else:
            arrays = np.load(path, allow_pickle=False)
            arrays = {"": arrays} if isinstance(arrays, np.ndarray) else arrays
        keys = [key for key in arrays if key != "metadata"]
        if request.key in keys or (request.key is None and len(keys) == 1):
            found = arrays[request.key or keys[0]]
            if not isinstance(found, TensorInfo):
                return torch.from_numpy(found)
            data = torch.from_numpy(np.fromfile(path, np.uint8, found.nbytes, offset=found.offset))
            return data.view(PLAIN[found.format]).view(found.shape)
    except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"`{path}` cannot be read: {words}", hint=hint) from error
    raise UsageError(
        f"`{path}` has no single array" if request.key is None
        else f"`{path}` has no array `{request.key}`",
        hint=f"name one, as in `{path}:{keys[0]}`; it has {', '.join(keys[:8])}" if keys else hint,
    )


@dataclass(frozen=True)
class _Change:
    """The function of one `Edit`: `value` `[…, N, …]` is that of token t at t + `shift`.

    Says in `changed` whether any number became another one.
    """

    request: EditRequest
    name: str
    places: Places
    value: Tensor | None
    shift: int
    changed: dict[str, bool]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """The activation `[B, …, T, …]` with what the edit makes of it at its places."""
        mask, picked = self._mask(x, positions), x
        if self.value is not None:
            picked, known = self._picked(self.value, x, positions)
            mask = mask & known
        match self.request.verb:
            case "zero":
                made = torch.zeros_like(x)
            case "scale":
                made = x * self.request.number
            case "noise":
                made = x + self.request.number * self._noise(x, positions)
            case "add":
                made = x + self.request.number * picked
            case _:
                made = picked
        out = torch.where(mask, made.to(x.dtype), x)
        if not self.changed[self.request.text]:
            self.changed[self.request.text] = not torch.equal(out, x)
        return out

    def _mask(self, x: Tensor, positions: Tensor) -> Tensor:
        mask = torch.ones([1] * x.ndim, dtype=torch.bool, device=x.device)
        for dim, (axis, (first, last)) in enumerate(self.places, 1):
            at = positions if axis == "T" else torch.arange(x.shape[dim], device=x.device)
            inside = at >= (first or 0)
            if last is not None:
                inside = inside & (at < last)
            mask = mask & along(inside, x, dim)
        return mask

    def _picked(self, value: Tensor, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The values of the tokens of `x`, and of which tokens there are any."""
        given, value = list(value.shape), value.to(x.device)
        if value.ndim == 1:
            value = value.view([1] * (x.ndim - 2) + [-1])
        elif value.ndim == x.ndim - 2:
            value = value.unsqueeze(-2)
        if self.places[-1][0] == "S":  # keys of later tokens have none
            value = F.pad(value, (0, x.shape[-1] - value.shape[-1]))
        sizes = zip(value.shape, x.shape[1:], strict=False)
        fits = [n in (1, size) for n, size in sizes]
        if value.ndim != x.ndim - 1 or not all(fits[:-2] + fits[-1:]):
            raise UsageError(
                f"`--edit {self.request.text}`: an array {given} does not fit "
                f"`{self.name}` [{', '.join(axis for axis, _ in self.places)}]",
                hint=f"without its tokens it has the shape {[*x.shape[1:-2], x.shape[-1]]}",
            )
        tokens = value.shape[-2]
        if tokens == 1 and not self.shift:
            return value, torch.ones([1] * x.ndim, dtype=torch.bool, device=x.device)
        at = positions + self.shift
        known = (at >= 0) & (at < tokens)
        rows = value.movedim(-2, 0)[at.clamp(0, tokens - 1)].movedim(positions.ndim - 1, -2)
        return rows, along(known, x, x.ndim - 2)

    def _noise(self, x: Tensor, positions: Tensor) -> Tensor:
        """Normal numbers `[…, T, …]`, of each position always the same."""
        rows = []
        for at in positions.flatten().tolist():
            key = f"{self.request.seed} {self.name} {at}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.randn([*x.shape[1:-2], x.shape[-1]], generator=generator))
        drawn = torch.stack(rows).view(*positions.shape, *rows[0].shape)
        return drawn.movedim(positions.ndim - 1, -2).to(x.device, x.dtype)


def along(mask: Tensor, x: Tensor, dim: int) -> Tensor:
    """A mask `[n]`, or `[B, n]` of each sequence, along an axis of `x`."""
    shape = [1] * x.ndim
    shape[dim], shape[0] = mask.shape[-1], mask.shape[0] if mask.ndim == 2 else 1
    return mask.view(shape)
