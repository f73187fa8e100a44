"""Which experts every token takes, seen while the model reads and writes as `generate` does.

Kept of a layer, for every token: the chosen experts, their weights, the margin, and the share of
the shared expert. Scores and hidden numbers are read chunk by chunk and forgotten.

Axes: T tokens of one call, P positions shown, E experts, K chosen ones, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.evaluate import routing as evaluation
from llmcli.graph.graph import graph
from llmcli.graph.ops import Op
from llmcli.graph.routing import Choose, Share, SumExperts, Weigh
from llmcli.inspect.formulas import formula_checks, formula_inputs, worst
from llmcli.inspect.kernel import Kernel, layer_of, rules
from llmcli.inspect.passes import Passes
from llmcli.model import Model, dtype_name
from llmcli.records.document import ViewCheck

AnyOp = TypeVar("AnyOp", bound=Op)

# What is held against the formulas, and what each check says of it.
WORDS = {
    "choice": "the chosen experts are the top of the scores that choose",
    "weights": "scores and weights are what their formulas make of what was emitted",
    "sum": "the weighted sum, and the shared expert, is what the layer's mixture adds",
}


def measure_experts(
    passes: Passes, layers: Sequence[int], *, span: Callable[[int], range]
) -> ExpertsReport:
    """The mixtures of `layers` at the positions `span(number of tokens)`.

    Raises OutOfMemory, NotFinite, and what `span` raises.
    """
    model, total = passes.model, passes.most
    mixtures = {layer: Mixture(model, layer) for layer in layers}
    held = sum(mixture.token_bytes for mixture in mixtures.values()) * total
    devices.require_memory(
        held + model.decoder.state_bytes(1, total),
        model.device,
        f"the cache of {total} tokens and what they choose in {len(layers)} layers",
        "use a shorter prompt, a smaller --generate, or fewer layers with --layer",
    )
    passes.write()
    positions = span(len(passes.ids))

    def watch(first: int, name: str, tensor: Tensor) -> None:
        if (layer := layer_of(name)) in mixtures:
            mixtures[layer].watch(first, name, tensor)

    passes.in_chunks(watch)
    found = tuple(mixture.report(positions) for mixture in mixtures.values())
    of_layers = [mixture.checks for mixture in mixtures.values()]
    formulas = tuple(
        replace(worst(checks[name] for checks in of_layers), name=name, words=words)
        for name, words in WORDS.items()
    )
    return ExpertsReport(
        dtype=dtype_name(model.dtype),
        tokens=model.tokens(passes.ids),
        prompt_tokens=passes.prompt_tokens,
        positions=tuple(positions),
        layers=found,
        checks=(*formulas, loads_check(found), *passes.checks),
    )


class Mixture:
    """Watches the mixture of one layer while tokens are read in chunks."""

    def __init__(self, model: Model, layer: int) -> None:
        self._model, self._layer = model, layer
        self._graph = graph(model.config)
        self._chosen, self._choose = self._of(Choose)
        self._weights, _ = self._of(Weigh)
        self._out, self._sum = self._of(SumExperts)
        self._names = self._groups()
        wanted = [name for names in self._names.values() for name in names]
        self._inputs = formula_inputs(model.config, wanted)
        self._now: dict[str, Tensor] = {}
        self._kept: list[tuple[Tensor, ...]] = []
        self.checks: dict[str, ViewCheck] = {}

    def _of(self, kind: type[AnyOp]) -> tuple[str, AnyOp]:
        """The node of this layer that such an op makes."""
        inside = (node for node in self._graph.nodes.values() if node.layer == self._layer)
        return next((node.name, node.op) for node in inside if isinstance(node.op, kind))

    def _groups(self) -> dict[str, list[str]]:
        """The activations of every check: from sum and weights back to the first matrices."""
        found: dict[str, None] = {}
        pending = [self._out, self._weights]  # which the sum does not read if they weigh inputs
        for name in pending:
            if not self._graph[name].op.by_rows:
                found[name] = None
                pending += self._graph[name].op.inputs
        scores = {name for name in found if isinstance(self._graph[name].op, Share | Weigh)}
        rest = [name for name in found if name not in scores and name != self._chosen]
        return {"choice": [self._chosen], "weights": sorted(scores), "sum": rest}

    @property
    def token_bytes(self) -> int:
        """What is kept of one token."""
        return 8 + self._choose.count * (4 + self._model.stream_dtype.itemsize)

    def watch(self, first: int, name: str, tensor: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite."""
        if name not in self._inputs:
            return
        self._now[name] = tensor
        if name == self._out:
            seen, self._now = self._now, {}
            self._read(first, seen)

    def _read(self, first: int, seen: dict[str, Tensor]) -> None:
        """All tokens of one call."""
        end = first + seen[self._out].shape[-2]
        ids = range(end)  # no formula here reads them
        for check, names in self._names.items():
            found = formula_checks(self._model, ids, seen, names)
            self.checks[check] = worst((*filter(None, [self.checks.get(check)]), found))
        chosen_TK = seen[self._chosen][0].int()
        kept = [chosen_TK, seen[self._weights][0], self._margins(first, seen, chosen_TK)]
        if self._sum.also is not None:
            shared_TD = seen[self._sum.also][0]
            shared_T = shared_TD.norm(dim=-1)
            routed_T = (seen[self._out][0] - shared_TD).norm(dim=-1)
            kept.append((shared_T / (shared_T + routed_T)).float())
        self._kept.append(tuple(one.cpu() for one in kept))

    def _margins(self, first: int, seen: dict[str, Tensor], chosen_TK: Tensor) -> Tensor:
        """The last chosen minus the first not chosen, of the scores that choose: float32 `[T]`."""
        known, end = rules(self._model.config), first + len(chosen_TK)
        emitted = {name: tensor[0] for name, tensor in seen.items()}
        own = Kernel(self._model, known, range(end), emitted=emitted, positions=range(first, end))
        score_TE = cast("evaluation.Choose", known[self._chosen]).eligible(own)
        index_TK = chosen_TK.long().cpu()
        last_T = score_TE.gather(1, index_TK).amin(1)
        refused_T = score_TE.scatter(1, index_TK, -math.inf).amax(1)
        margin_T = last_T - refused_T
        return margin_T.where(margin_T.isfinite(), math.nan).float()

    def report(self, positions: range) -> ExpertsLayer:
        """The layer's report at `positions`."""
        chosen_PK, weights_PK, margins_P, *shares = (
            torch.cat(parts)[positions.start : positions.stop].numpy()
            for parts in zip(*self._kept, strict=True)
        )
        experts, choose = self._graph.sizes(self._layer)["E"], self._choose
        load_E = loads(chosen_PK, experts)
        weighed_E = np.bincount(chosen_PK.ravel(), weights_PK.ravel(), experts)[:experts]
        share_E = load_E[load_E > 0] / load_E.sum()
        entropy = float(-(share_E * np.log(share_E)).sum()) + 0.0
        real_P = np.flatnonzero(~np.isnan(margins_P))
        smallest = int(real_P[margins_P[real_P].argmin()]) if real_P.size else None
        source = self._graph[choose.source].op
        return ExpertsLayer(
            layer=self._layer,
            experts=experts,
            per_token=choose.count,
            scores=source.function if isinstance(source, Share) else "logits",
            corrected=choose.correction is not None,
            groups=choose.groups,
            kept_groups=choose.kept,
            group_best=choose.best,
            load=tuple(load_E.tolist()),
            mean_weights=tuple(
                weight / count if count else math.nan
                for weight, count in zip(weighed_E.tolist(), load_E.tolist(), strict=True)
            ),
            entropy=entropy,
            balance=entropy / math.log(experts) if experts > 1 else 1.0,
            unused=tuple(np.flatnonzero(load_E == 0).tolist()),
            mean_margin=float(margins_P[real_P].mean()) if real_P.size else math.nan,
            smallest_margin=math.nan if smallest is None else float(margins_P[smallest]),
            smallest_at=None if smallest is None else positions[smallest],
            shared_share=float(np.mean(shares[0], dtype=np.float64)) if shares else None,
            chosen=chosen_PK,
            weights=weights_PK,
            margins=margins_P,
            shared_shares=shares[0] if shares else None,
        )


def loads(chosen_PK: np.ndarray, experts: int) -> np.ndarray:
    """How often each expert was chosen, int64 `[E]`."""
    return np.bincount(chosen_PK.ravel(), minlength=experts)[:experts]


def loads_check(layers: Sequence[ExpertsLayer]) -> ViewCheck:
    """That every choice is counted once."""
    off, layer = max(
        (abs(sum(one.load) - one.per_token * len(one.chosen)), one.layer) for one in layers
    )
    return ViewCheck(
        name="loads",
        words="the loads of a layer add up to tokens × experts chosen",
        value=float(off),
        tolerance=0.0,
        where=f"blocks.{layer}.moe.expert_idx" if off else "",
    )
