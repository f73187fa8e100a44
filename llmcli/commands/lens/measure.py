"""The logit lens (nostalgebraist 2020): every place of the residual stream read as an output.

`lens(h) = softmax(Norm_f(h) W_Uᵀ + b_U)`: the model's own final norm and head on a row that has
not gone through the later layers. The norm's statistics are the row's own; with those of the last
row instead (which is right for shares of a logit) early rows look nearly uniform.

The formula is written a second time here (`unembed`), after the papers and not after `nn`, so that
a wrong weight or ε in the model's own final norm or head shows. What a family does to its logits
after the product (a scale, a soft cap) belongs into `unembed`, and nowhere else in what looks
inside.

Axes: R rows (places of the stream), B batch (1), T tokens of one call, P positions kept or of one
chunk, N rows of any number, D width, V vocabulary, k likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.lens.report import LensCell, LensReport, LensRow, LensToken
from llmcli.config.model import ModelConfig
from llmcli.config.norm import NormConfig
from llmcli.errors import NotFinite
from llmcli.evaluate import rule
from llmcli.graph.block import block_names
from llmcli.inspect.kernel import edited, layer_of
from llmcli.inspect.passes import Passes
from llmcli.model import Model, dtype_name
from llmcli.ops.norm import at_least_float32
from llmcli.records.document import ViewCheck
from llmcli.weights.packed import Packed

Target = Literal["output", "next"] | int

CHUNK = 1 << 25  # logits R · P · V that exist at a time: 128 MiB of float32
# How many roundings (eps) of its largest logit the logits of a row may be off. Measured on a CPU,
# the worst token of all positions, half the difference of log-probabilities in such roundings: in
# float32 5.9, in 16 bits 0.65, where products are summed in float32 (1500 positions of smollm2;
# less in tiny and in small random models of every family). A GPU may add parts of a product in 16
# bits; how far that goes is not measured, and its number here is a guess.
ROUNDINGS = 16.0
HALF_ROUNDINGS, HALF_ROUNDINGS_GPU = 1.0, 4.0

# what is compared of both distributions
WORDS = {
    "output": "in probability",
    "output_logprob": "in log-probability of every token",
    "output_kl": "KL in nats",
}

_AFTER_STREAM = ("ln_final.out", "head_proj", "logits_raw")
_BLOCK = 1 << 22  # numbers of the head's matrix that are converted at a time


def places(
    config: ModelConfig, layers: Sequence[int] | None = None, *, mid: bool = False
) -> tuple[str, ...]:
    """The rows of `layers` in execution order, with `mid` also those inside a layer.

    None: all layers, and the embedding first. The last row of the model is always one of them: the
    others are compared with it. Where parts of a block stand side by side nothing is between them.
    """
    count = len(config.layers)
    found = ["blocks.0.resid_pre"] if layers is None else []
    for layer in range(count) if layers is None else sorted(set(layers)):
        leaves = [one.stream_out for one in block_names(config.layers[layer], f"blocks.{layer}")]
        found += leaves if mid else leaves[-1:]
    return tuple(dict.fromkeys([*found, f"blocks.{count - 1}.resid_post"]))


def measure_lens(
    passes: Passes,
    *,
    span: Callable[[int], range],
    layers: Sequence[int] | None = None,
    mid: bool = False,
    top: int = 5,
    target: Target = "output",
) -> LensReport:
    """Reads the rows of `layers` (`places`) at the positions `span(number of tokens)`.

    `top` tokens of each. `target`, whose rank is followed: the output's own likeliest token, the
    text's next one (at the last position the output's), or a token id. Kept are the rows of all
    layers at the positions (R · P · D numbers), chosen or not, for `settled` is about all; and
    never all logits. Raises OutOfMemory, NotFinite and what `span` raises.
    """
    model = passes.model
    every = places(model.config, mid=mid)
    # an end of text moves what counts from it
    most = passes.most if passes.generate else len(span(passes.most))
    _require_memory(model, len(every), most, passes.most)
    passes.write()
    positions = span(len(passes.ids))
    stream = Stream(model, every, positions)
    agreement = Agreement(model.dtype, model.device)

    def watch(first: int, name: str, tensor: Tensor) -> None:
        stream.watch(first, name, tensor)
        # of each call's last token, where there are any
        if name == "logits" and edited(model).isdisjoint(_AFTER_STREAM):
            h_TD = stream.last_TD
            position = first + len(h_TD) - 1
            _require_finite(tensor, range(position, position + 1), model)
            agreement.add([position], unembed(model, h_TD[-1:]), tensor[0, -1:])

    passes.in_chunks(watch)
    cells: dict[str, list[LensCell]] = {name: [] for name in places(model.config, layers, mid=mid)}
    targets: list[LensToken] = []
    firsts: list[str] = []  # from which on the output's token stays likeliest

    def token(id: int, probability: float) -> LensToken:
        return LensToken(id=id, text=model.token_text(id), probability=probability)

    def read(positions: range) -> None:
        """All rows at those positions, with the model's own final norm and head after the last."""
        h_RPD = stream.rows(positions)
        own_PV = model.decoder.logits(model.decoder.ln_final(h_RPD[-1]))
        logits_RPV = unembed(model, h_RPD.flatten(0, 1)).view(*h_RPD.shape[:2], -1)
        _require_finite(own_PV, positions, model)
        _require_finite(logits_RPV, positions, model)
        agreement.add(positions, logits_RPV[-1], own_PV)
        output_PV, best_P = own_PV.log_softmax(-1), own_PV.argmax(-1)
        target_P = best_P
        if target == "next":
            after = passes.ids[positions.start + 1 : positions.stop + 1]
            known_N = torch.tensor(after, device=best_P.device, dtype=best_P.dtype)
            target_P = torch.cat((known_N, best_P[len(after) :]))
        elif target != "output":
            target_P = torch.full_like(best_P, target)
        probabilities = output_PV.gather(1, target_P[:, None]).exp()[:, 0].tolist()
        targets.extend(map(token, target_P.tolist(), probabilities))
        for name, logits_PV in zip(every, logits_RPV, strict=True):
            if name in cells:
                columns = _row(logits_PV, output_PV, target_P, min(top, model.config.vocab))
                cells[name] += [
                    LensCell(
                        top=tuple(map(token, ids, probabilities)),
                        entropy=entropy,
                        kl=kl,
                        target_rank=rank,
                        target_probability=probability,
                    )
                    for ids, probabilities, entropy, kl, rank, probability in zip(
                        *(column.tolist() for column in columns), strict=True
                    )
                ]
        firsts.extend(every[row] for row in settled(logits_RPV, best_P).tolist())

    step = max(1, CHUNK // (len(every) * model.config.vocab))
    with torch.inference_mode():
        for start in range(positions.start, positions.stop, step):
            passes.progress("reading the rows", start - positions.start, len(positions))
            read(range(start, min(start + step, positions.stop)))
    words = {"output": "the model's top token", "next": "the next token of the text"}
    return LensReport(
        dtype=dtype_name(model.dtype),
        vocabulary=model.config.vocab,
        tokens=model.tokens(passes.ids),
        prompt_tokens=passes.prompt_tokens,
        positions=tuple(positions),
        target="the token given" if isinstance(target, int) else words[target],
        targets=tuple(targets),
        rows=tuple(
            LensRow(
                name=name,
                layer=None if name.endswith("resid_pre") else layer_of(name),  # of the embedding
                cells=tuple(row),
            )
            for name, row in cells.items()
        ),
        settled=tuple(firsts),
        checks=(*agreement.checks(), stream.check(), *passes.checks),
    )


def _require_memory(model: Model, rows: int, positions: int, tokens: int) -> None:
    """Raises OutOfMemory where the rows, the cache of `tokens` tokens, and the logits of one chunk
    do not fit."""
    vocab, width = model.config.vocab, model.config.width
    at_once = min(max(1, CHUNK // (rows * vocab)), positions)
    # and what a row of cells is worked out with, and the comparison in float64, one after the other
    numbers = (rows + 12) * at_once * vocab
    devices.require_memory(
        rows * positions * width * model.stream_dtype.itemsize
        + model.decoder.state_bytes(1, tokens)
        + numbers * model.stream_dtype.itemsize,
        model.device,
        f"{rows} rows of {positions} positions and the cache of {tokens} tokens",
        "use a shorter prompt, a smaller --generate, or choose fewer positions with --position",
    )


class Stream:
    """Watches a run: keeps `names` at `positions`, and adds up what is added to the stream.

    Every place of it that is not edited has to be the place before plus what was added since; the
    first is the embedding.
    """

    def __init__(self, model: Model, names: tuple[str, ...], positions: range) -> None:
        self.names = names
        # what is added, and the places of the stream, each with what its sum is multiplied by
        self._added = set(model.config.embedding.residual_updates)
        self._places: dict[str, float] = {}
        self._begins = {"embed"}  # the stream's first part, or its normalized replacement
        for number, layer in enumerate(model.config.layers):
            for sublayer in block_names(layer, f"blocks.{number}"):
                self._places |= {sublayer.stream: 1.0, sublayer.stream_out: 1.0}
                self._added |= {sublayer.residual, *sublayer.residual_updates}
                self._begins |= {sublayer.residual} - {sublayer.stream}
            self._places[sublayer.stream_out] = layer.scale
            if layer.scaled:
                factor = model.decoder.weight(f"blocks.{number}.out_scale.w").dense()
                self._places[sublayer.stream_out] *= float(factor)
        self._dtype, self._computed = model.stream_dtype, model.dtype
        self._positions, self._edited = positions, edited(model)
        size = (len(names), len(positions), model.config.width)
        self._rows_RPD = torch.empty(size, dtype=self._dtype, device=model.device)
        self._parts: list[Tensor] = []
        self._off, self._where = 0.0, ""

    def watch(self, first: int, name: str, x_BTD: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite."""
        changed = name in self._places and name in self._edited
        if name in self._begins or changed:
            self._parts = []
        if name in self._places and not changed:
            self._add_up(first, name, x_BTD[0])
        if name in self._places or name in self._added:
            self._parts.append(x_BTD[0])
        if name in self.names:
            begin = self._positions.start
            start, stop = max(first, begin), min(first + x_BTD.shape[1], self._positions.stop)
            if start < stop:
                rows_PD = self._rows_RPD[self.names.index(name), start - begin : stop - begin]
                rows_PD.copy_(x_BTD[0, start - first : stop - first])

    @property
    def last_TD(self) -> Tensor:
        """The latest place of the stream, all tokens of that call."""
        return self._parts[-1]

    def rows(self, positions: range) -> Tensor:
        """`[R, P, D]` at some of the positions that were kept, in the stream's dtype."""
        begin = self._positions.start
        return self._rows_RPD[:, positions.start - begin : positions.stop - begin]

    def check(self) -> ViewCheck:
        """The worst difference, as a share of the numbers that were added.

        One sum is rounded once, by half of eps at most; GPUs may do it in another order. The stream
        has at least float32 whatever the model computes in: one that was rounded to less is wrong.
        """
        return ViewCheck(
            name="residual_stream",
            words="every row is the one before plus its layer, relative",
            value=self._off,
            tolerance=torch.finfo(self._dtype).eps,
            where=self._where,
        )

    def _add_up(self, first: int, name: str, x_TD: Tensor) -> None:
        parts = [part.to(self._dtype) for part in self._parts]
        size_TD = sum((part.abs() for part in parts), torch.zeros_like(parts[0]))
        total_TD = sum(parts[1:], parts[0])
        if (scale := self._places[name]) != 1:
            total_TD, size_TD = total_TD * scale, size_TD * abs(scale)
        apart_TD = (total_TD - x_TD.to(self._dtype)).abs()
        share_T = (apart_TD / size_TD.clamp_min(torch.finfo(self._dtype).tiny)).amax(-1)
        off, at = (float(found) for found in share_T.max(0))
        if not math.isfinite(off):
            worst = int((~torch.isfinite(share_T)).nonzero()[0])
            raise NotFinite(
                f"`{name}` is not finite at position {first + worst}",
                dtype=dtype_name(self._computed),
            )
        if off > self._off:
            self._off, self._where = off, f"{name}, position {first + int(at)}"
        self._parts = []


def _row(logits_PV: Tensor, output_PV: Tensor, target_P: Tensor, top: int) -> tuple[Tensor, ...]:
    """The `top` likeliest tokens of a row and their probabilities, both `[P, k]`, entropy,
    divergence from the output's log-probabilities, rank and probability of the target, `[P]`."""
    lens_PV = logits_PV.log_softmax(-1)
    p_PV = lens_PV.exp()
    kl_P = (output_PV.exp() * (output_PV - lens_PV)).sum(-1)
    top_Pk = logits_PV.topk(top, -1).indices
    return (
        top_Pk,
        p_PV.gather(1, top_Pk),
        (-(p_PV * lens_PV).sum(-1)).clamp_min(0),
        kl_P.clamp_min(0),
        _rank(logits_PV, target_P),
        p_PV.gather(1, target_P[:, None])[:, 0],
    )


def _rank(logits_PV: Tensor, ids_P: Tensor) -> Tensor:
    """The rank of each token: 1 for the likeliest."""
    return (logits_PV > logits_PV.gather(1, ids_P[:, None])).sum(-1) + 1


def settled(logits_RPV: Tensor, best_P: Tensor) -> Tensor:
    """The first row from which on `best_P` stay likeliest.

    The last row, which is the output, always counts: its roundings differ from the model's.
    """
    likeliest_RP = torch.stack([_rank(logits_PV, best_P) == 1 for logits_PV in logits_RPV])
    likeliest_RP[-1] = True
    return len(likeliest_RP) - likeliest_RP.flip(0).cumprod(0).sum(0)


def _require_finite(logits: Tensor, positions: range, model: Model) -> None:
    """Raises NotFinite where a logit of the model, `[…, P, V]`, is not finite."""
    bad = ~torch.isfinite(logits).all(-1).reshape(-1, len(positions)).all(0)
    if bad.any():
        raise NotFinite(
            f"the logits at position {positions[int(bad.nonzero()[0])]} are not finite",
            dtype=dtype_name(model.dtype),
        )


# from rows of the residual stream to logits


def unembed(model: Model, h_ND: Tensor) -> Tensor:
    """`Norm_f(h) W_Uᵀ + b_U`, `[N, V]` in at least float32, with every row's own statistics.

    A matrix in blocks rounds its input (`Packed.quantized_input`). Where a number of the formula's
    norm and of the model's differ by rounding only, it is rounded as the model's is. For embeddings
    of another width than the stream, `Norm_f(h)` is projected first.
    """
    weight, config = model.decoder.weight, model.config
    bias = weight("ln_final.b").dense() if config.final_norm.bias else None
    norm_D = weight("ln_final.w").dense() if config.final_norm.weights else None
    x_ND = normalized(at_least_float32(h_ND), config.final_norm, norm_D, bias)
    head, project = weight("head.W"), model.decoder.head_proj
    own_ND = model.decoder.ln_final(h_ND)
    for matrix in (head,) if project is None else (project, head):
        if isinstance(matrix, Packed):
            off_N1 = ROUNDINGS * torch.finfo(own_ND.dtype).eps * x_ND.abs().amax(-1, keepdim=True)
            rounded = matrix.quantized_input(x_ND), matrix.quantized_input(own_ND)
            x_ND = rule.settled(x_ND, *rounded, off_N1)
        if matrix is not head:
            x_ND, own_ND = x_ND @ matrix.dense(x_ND.dtype).t(), matrix.matmul(own_ND)
    rows, columns = head.shape
    logits_NV = x_ND.new_empty(len(x_ND), rows)
    step = max(1, _BLOCK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        logits_NV[:, part] = x_ND @ head.dense(x_ND.dtype, rows=part).t()
    if config.head.bias:
        logits_NV.add_(weight("head.b").dense())
    cap = config.head.cap
    return logits_NV * config.head.scale if cap is None else cap * (logits_NV / cap).tanh()


def normalized(x_ND: Tensor, config: NormConfig, w_D: Tensor | None, b_D: Tensor | None) -> Tensor:
    """`x / √(mean(x²) + ε) · w` (RMSNorm), `(x − μ) / √(mean((x − μ)²) + ε) · w + b` (LayerNorm).

    With an offset `offset + w` in place of w, without weights 1. Computed in the dtype of `x`.
    """
    if config.kind == "layer":
        x_ND = x_ND - x_ND.mean(-1, keepdim=True)
    x_ND = x_ND / ((x_ND * x_ND).mean(-1, keepdim=True) + config.eps).sqrt()
    if w_D is not None:
        x_ND = x_ND * (config.offset + w_D.to(x_ND.dtype))
    return x_ND if b_D is None else x_ND + b_D.to(x_ND.dtype)


class Agreement:
    """Whether logits by the formula are the model's own, compared as distributions.

    Where every logit is off by at most e, the divergence is at most e²/2 (Hoeffding's lemma: the
    difference has a range of 2e), a probability is off by at most e/2 (Pinsker's inequality) and
    a log-probability by at most 2e (the logarithm of the sum is off by at most e, too). The last
    is what sees a token that is unlikely in both. e is a number of roundings of the row's largest
    logit. The comparison itself is done in float64, whose own roundings are allowed as well.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        half = HALF_ROUNDINGS if device.type == "cpu" else HALF_ROUNDINGS_GPU
        roundings = half if dtype.itemsize == 2 else ROUNDINGS
        self._off = roundings * torch.finfo(dtype).eps
        self._shares = dict.fromkeys(WORDS, -1.0)  # of what is allowed, the largest
        self._worst: dict[str, ViewCheck] = {}

    def add(self, positions: Sequence[int], formula_NV: Tensor, own_NV: Tensor) -> None:
        """Row n of both is read at `positions[n]`."""
        ours_NV, theirs_NV = (
            t.to("cpu", torch.float64).log_softmax(-1) for t in (formula_NV, own_NV)
        )
        largest_N = own_NV.abs().amax(-1).to("cpu", torch.float64)
        off_N = self._off * largest_N
        itself_N = 32 * torch.finfo(torch.float64).eps * largest_N.clamp_min(1)
        kl_N1 = (theirs_NV.exp() * (theirs_NV - ours_NV)).sum(-1, keepdim=True)
        for name, apart_NV, allowed_N in (
            ("output", ours_NV.exp() - theirs_NV.exp(), off_N / 2),
            ("output_logprob", ours_NV - theirs_NV, 2 * off_N),
            ("output_kl", kl_N1, off_N * off_N / 2),
        ):
            value_N, token_N = apart_NV.abs().max(-1)  # NaN if there is one
            allowed_N = allowed_N + itself_N
            shares = (value_N / allowed_N).nan_to_num(math.inf).tolist()
            n = max(range(len(shares)), key=shares.__getitem__)
            if shares[n] <= self._shares[name]:
                continue
            value, place = float(value_N[n]), f"position {positions[n]}"
            place += "" if name == "output_kl" else f", id {int(token_N[n])}"
            self._shares[name] = shares[n]
            self._worst[name] = ViewCheck(
                name=name,
                words=f"the last row is the model's output, {WORDS[name]}",
                value=value,
                tolerance=float(allowed_N[n]),
                where=place if value else "",
            )

    def checks(self) -> tuple[ViewCheck, ...]:
        """The position that uses most of what it is allowed, by each of the three."""
        return tuple(self._worst[name] for name in WORDS)
