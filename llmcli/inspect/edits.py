"""Applies the edits of `--edit` (`graph.edited`) to every pass of a model.

Axes: B batch, T new tokens of a call, N tokens of another run or an array; others as the graph's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.checkpoints.safetensors import read_safetensors
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.decoder.decoder import check_edits
from llmcli.devices import float64_device
from llmcli.engine.session import Session
from llmcli.errors import LlmcliError, UsageError
from llmcli.graph.edited import TOKENS, EditRequest, Places, from_start
from llmcli.graph.graph import graph
from llmcli.inspect.kernel import last_layer, layer_of
from llmcli.model import Model
from llmcli.nn.step import Edit
from llmcli.ops.quant.decode import PLAIN
from llmcli.records.numbers import counted
from llmcli.shell.documents import read_text
from llmcli.shell.prompts import need_tokenizer

Ids = Sequence[int]


def apply_edits(model: Model, prompts: Sequence[Ids], window: int | None = None) -> None:
    """From now on every pass of the model has its `edits`; positions are those of `prompts`.

    What `mean` and `from` need is computed by passes over their prompts without any edit, of at
    most `window` tokens (default: the context). Raises UsageError for what does not fit the prompts
    or the activations, and for files that cannot be read; then the model is as before.
    """
    before = model.decoder.edits, model.changed
    model.decoder.edits, model.changed = (), {}
    try:
        model.decoder.edits = tuple(_edits(model, prompts, window or model.config.room()))
    except BaseException:
        model.decoder.edits, model.changed = before
        raise


def _edits(model: Model, prompts: Sequence[Ids], window: int) -> list[Edit]:
    """See `apply_edits`."""
    check_edits(model.config, [name for request in model.edits for name in request.places])
    found, lengths = [], set(map(len, prompts))
    for request in model.edits:
        if (request.of_prompt and len(prompts) != 1) or (request.of_length and len(lengths) != 1):
            raise UsageError(
                f"`{request.given}` depends on the prompt, which has to be the only one",
                hint="count positions from the start, or take numbers from a file",
            )
        for name in request.places:
            if name.endswith("expert_idx") and request.verb not in ("zero", "from"):
                raise UsageError(
                    f"`{name}` are numbers of experts: `{request.verb}` makes no such numbers",
                    hint="use `zero` or `from`, or edit `expert_weight`",
                )
        model.changed[request.text] = False
        tokens = len(prompts[0]) if len(lengths) == 1 else 0
        other, values = tokens, {}
        if request.path and request.verb != "mean":
            values = dict.fromkeys(request.places, _array(request))
        elif request.verb in ("mean", "from"):
            runs = _runs(request, model, prompts[0] if prompts else (), window)
            values = emitted(model, runs, request.places, mean=request.verb == "mean")
            other = len(runs[0]) if request.prompt is not None else tokens
        for name, places in request.places.items():
            here, there = (known_places(places, size, request) for size in (tokens, other))
            shift = _shift(here, there, tokens, other, request) if other != tokens else 0
            value = values.get(name)
            if value is not None and name.endswith("expert_idx"):
                experts = graph(model.config).sizes(layer_of(name))["E"]
                if not torch.isin(value, torch.arange(experts).to(value)).all():
                    raise UsageError(
                        f"`{request.path}` has other numbers than those of experts",
                        hint=f"`{name}` are 0 to {experts - 1}",
                    )
            found.append(
                Edit(name=name, fn=Change(request, name, here, value, shift, model.changed))
            )
    return found


def known_places(places: Places, tokens: int, request: EditRequest) -> Places:
    """The places with positions of tokens from the start. Raises UsageError for those before it,
    and for none.
    """
    found = []
    for axis, span in places:
        first, last = from_start(span, tokens) if axis in TOKENS else span
        if (first or 0) < 0 or (last is not None and last <= (first or 0)):
            raise UsageError(
                f"`{request.given}`: the prompt has {counted(tokens, 'token')}",
                hint=f"positions go from 0 to {tokens - 1}; -1 is the last",
            )
        found.append((axis, (first, last)))
    return tuple(found)


def _shift(here: Places, there: Places, tokens: int, other: int, request: EditRequest) -> int:
    """How many tokens later the same place is in another prompt, of another length."""
    pairs = ((dict(here)["T"], tokens), (dict(there)["T"], other))
    (first, last), (begin, end) = (
        (a or 0, size if b is None else b) for (a, b), size in pairs
    )
    if last - first != end - begin or end > other or "S" in dict(here):
        raise UsageError(
            f"`{request.given}`: the prompt has {counted(tokens, 'token')}, "
            f"the other one {other}",
            hint="say which tokens, such as T=-1 or T=2:5",
        )
    return begin - first


def _runs(request: EditRequest, model: Model, ids: Ids, window: int) -> list[Ids]:
    """The tokens that `mean` and `from` read, in pieces of a mean's longer prompts."""
    found = [ids]
    if request.prompt is not None or request.path:
        prompt = request.prompt
        texts = read_text(request.path).split("\n") if prompt is None else [prompt]
        tokenizer = need_tokenizer(model.tokenizer, model.name)
        found = [tokenizer.encode(text) for text in texts if text]
    if not all(found) or not found:
        raise UsageError(f"`{request.given}`: there is no text", hint="give a prompt")
    pieces = [one[at : at + window] for one in found for at in range(0, len(one), window)]
    keys = any("S" in dict(places) for places in request.places.values())
    if len(pieces) > 1 and (keys or request.prompt is not None):
        if request.path:
            why, hint = "several prompts have no mean with keys", "edit what has no axis S"
        else:
            why, hint = f"the prompt is longer than {window} tokens", "give a shorter one"
        raise UsageError(f"`{request.given}`: {why}", hint=hint)
    return pieces


def emitted(
    model: Model, runs: Sequence[Ids], names: Collection[str], *, mean: bool
) -> dict[str, Tensor]:
    """Activations of these runs, without a batch axis; `mean`: of all their tokens, `[…, 1, …]`.

    Those that fused kernels do not store, too.
    """
    whole = graph(model.config)
    derived = [name for name in names if not whole.written(name)]
    same = [Edit(name=name, fn=lambda x, positions: x) for name in derived]
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    total = sum(map(len, runs))

    def tap(name: str, tensor: Tensor) -> None:
        if name in parts:
            now = tensor[0]
            if whole[name].axes[-1] == "S":  # a later chunk has more keys
                now = F.pad(now, (0, total - now.shape[-1]))
            if mean:
                now = now.to(float64_device(now.device), torch.float64).sum(-2, keepdim=True)
                now = sum(parts[name], now)
                parts[name].clear()
            parts[name].append(now)

    until = last_layer(names)
    for ids in runs:
        session = Session(model.decoder, 1, len(ids))
        for at in range(0, len(ids), session.chunk):
            session.extend(
                torch.tensor([ids[at : at + session.chunk]], device=model.device),
                logits="all", until=until, totals=[len(ids)], tap=tap, edits=same,
            )  # fmt: skip
    return {
        name: found[0] / total if mean else torch.cat(found, -2) for name, found in parts.items()
    }


def _array(request: EditRequest) -> Tensor:
    """The array of a file, in float64 on the CPU. Raises UsageError."""
    path, hint = request.path, "numpy's .npy and .npz, and .safetensors are read"
    try:
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():  # a pipe would block
            raise ValueError("it is not a file")
        with file.open("rb") as opened:
            if path.endswith(".safetensors"):
                arrays: Mapping[str, Any] = read_safetensors(file)[1]
            else:
                arrays = np.load(opened, allow_pickle=False)
                arrays = {"": arrays} if isinstance(arrays, np.ndarray) else arrays
            keys = [key for key in arrays if key != "metadata"]
            if request.key in keys or (request.key is None and len(keys) == 1):
                found = arrays[request.key or keys[0]]
                if isinstance(found, TensorInfo):
                    if found.format not in PLAIN:
                        raise ValueError(f"numbers in {found.format} are not supported")
                    opened.seek(found.offset)
                    data = torch.frombuffer(bytearray(opened.read(found.nbytes)), dtype=torch.uint8)
                    array = data.view(PLAIN[found.format]).view(found.shape).double()
                else:
                    array = torch.from_numpy(np.asarray(found).astype(np.float64, "C", "same_kind"))
                if array.isnan().any():
                    raise ValueError("it has NaN")
                return array
    except LlmcliError as error:
        raise UsageError(error.message, hint=hint) from error
    except Exception as error:  # numpy's of damaged files, some of tokenize and zlib among them
        words = getattr(error, "strerror", None) or str(error).partition(". ")[0]
        raise UsageError(f"`{path}` cannot be read: {words}", hint=hint) from error
    raise UsageError(
        f"`{path}` has no single array" if request.key is None
        else f"`{path}` has no array `{request.key}`",
        hint=f"name one, as in `{path}:{keys[0]}`; it has {', '.join(keys[:8])}" if keys else hint,
    )


@dataclass(frozen=True)
class Change:
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
        if axis == "S":  # later tokens, and those that a window hides, stay unseen
            seen = torch.arange(x.shape[-1], device=x.device) <= positions.unsqueeze(-1)
            mask = mask & seen.view(-1, 1, *seen.shape[-2:]) & (x != -torch.inf)
        return mask

    def _picked(self, value: Tensor, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The values of the tokens of `x`, and of which tokens there are any."""
        given = list(value.shape)
        value = value.to(x.device, torch.promote_types(x.dtype, torch.float32))
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
                f"`{self.request.given}`: an array {given} does not fit "
                f"`{self.name}` [{', '.join(axis for axis, _ in self.places)}]",
                hint=f"without its tokens it has the shape {[*x.shape[1:-2], x.shape[-1]]}",
            )
        tokens = value.shape[-2]
        if tokens == 1 and self.request.prompt is None:
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
