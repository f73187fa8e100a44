"""Rules of routing: expert scores, the choice, and the weights of chosen experts.

Letters: T tokens, E experts, K chosen ones, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.evaluate.numbers import Number, fact, leaf, sigmoid
from llmcli.evaluate.pointwise import Pointwise
from llmcli.evaluate.rule import Exact, Numbers, Reader, Rule, ordinal, symbol
from llmcli.evaluate.softmax import share, softmax, uncertainty
from llmcli.graph import routing
from llmcli.records.explanation import Fact, Term
from llmcli.records.numbers import scored


class Share(Pointwise[routing.Share]):
    """`P = softmax(R)` row by row, or `P = σ(R)` number by number."""

    def _compute(self, read: Reader) -> Number:
        own = read(self.op.source)
        if self.op.function == "sigmoid":
            read.before = own.facts() if read.index else ()
            return sigmoid(own)
        *before, at = read.index
        row = dict(enumerate(read.values[self.op.source][tuple(before)].tolist()))
        return share(read, row, at, lambda at: self.cell(self.op.source, *before, at), "j")

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row, or number by number."""
        if self.op.function == "sigmoid":
            return super().tensor(values)
        return softmax(values[self.op.source])

    def magnitudes(self, values: Numbers) -> Tensor:
        """The error of the exponent is the relative error of the result."""
        if self.op.function == "sigmoid":
            return super().magnitudes(values)
        return uncertainty(values[self.op.source])


class Choose(Exact[routing.Choose]):
    """`e = top-K(P + c)`; near ties within rounding follow the kernel's choice."""

    def tensor(self, values: Numbers) -> Tensor:
        """The kernel's choice if it is optimal within rounding, else ours."""
        score_TE = self._scores(values)
        ours_TK = _largest(self._kept(score_TE), self.op.count)
        theirs_TK = values.kernel(self.node.name).long()
        good_T = self._good(score_TE, theirs_TK, self._slack(values, score_TE))
        return torch.where(good_T[:, None], theirs_TK, ours_TK).double()

    def eligible(self, values: Numbers) -> Tensor:
        """The scores for the choice, `[T, E]`: corrected, −∞ outside the best groups."""
        return self._kept(self._scores(values))

    def magnitude(self, values: Numbers, index: tuple[int, ...]) -> float:
        """Zero."""
        return 0.0

    def _compute(self, read: Reader) -> Number:
        token, place = read.index
        chosen_K = self.tensor(read.values)[token].long().tolist()
        score_E = self._scores(read.values)[token]
        kept_E = self._kept(score_E[None])[0]
        rest = [e for e in _largest(kept_E, len(kept_E)).tolist() if e not in chosen_K]
        refused = [e for e in rest[:1] if math.isfinite(float(kept_E[e]))]
        read.before = tuple(self._score(read, token, e) for e in (*chosen_K, *refused))
        if refused:
            *_, last = read.before
            others = replace(last, formula=f"the largest of the others: {last.formula}")
            read.before = (*read.before[:-1], others)
        read.note = f"the {self.op.count} largest choose"
        if self.op.groups > 1:
            read.before = (*self._group_facts(score_E), *read.before)
            read.note += f", of the best {self.op.kept} groups by {scored(self.op.best)}"
        read.follow = [(self.op.source, (token, chosen_K[place]))]
        return leaf(float(chosen_K[place]), f"the {ordinal(place)} largest is that of expert")

    def _score(self, read: Reader, token: int, expert: int) -> Fact:
        """The score of an expert."""
        score = read.at(self.op.source, token, expert)
        if (name := self.op.correction) is not None:
            score = score + read.stored(name, expert)
        (line,) = score.facts()
        return line

    def _group_facts(self, score_E: Tensor) -> Iterator[Fact]:
        """The scores of kept groups, best first, and the best score of the others."""
        score_Ge = score_E.view(self.op.groups, -1).sort(-1, descending=True).values
        order = _largest(self._groups(score_E[None])[0], self.op.groups).tolist()
        for rank, group in enumerate(order[: self.op.kept + 1]):
            largest = score_Ge[group, : self.op.best].tolist()
            parts = tuple(largest) if len(largest) > 1 else ()
            first, last = group * len(score_Ge[0]), (group + 1) * len(score_Ge[0]) - 1
            formula = f"group {group} (experts {first}–{last})" + " = {} + {}" * bool(parts)
            if rank == self.op.kept:
                formula = f"the best of the other groups: {formula}"
            yield fact(formula, sum(largest), *parts)

    def _scores(self, values: Numbers) -> Tensor:
        """The corrected scores, `[T, E]`."""
        score_TE, c = values[self.op.source], self.op.correction
        return score_TE if c is None else score_TE + values.vector(c)

    def _slack(self, values: Numbers, score_TE: Tensor) -> Tensor:
        """The maximum difference to the kernel's scores per token, `[T]`."""
        given_TE = values[self.op.source].abs()
        off_T = values.uncertainty(self.op.source, given_TE.amax(-1))
        if self.op.correction is not None or self.op.groups > 1:
            wide = torch.float64 if values.dtype == torch.float64 else torch.float32
            off_T = off_T + 4 * torch.finfo(wide).eps * score_TE.abs().amax(-1)
        return off_T

    def _groups(self, score_TE: Tensor) -> Tensor:
        """Group scores `[T, G]`: the sum of each group's best."""
        score_TGe = score_TE.view(len(score_TE), self.op.groups, -1)
        return score_TGe.sort(-1, descending=True).values[..., : self.op.best].sum(-1)

    def _inside(self, group_TG: Tensor, experts: int) -> Tensor:
        """Repeat values per group for each expert, `[T, E]`."""
        return group_TG.repeat_interleave(experts // self.op.groups, dim=1)

    def _kept(self, score_TE: Tensor) -> Tensor:
        """Set scores outside the best groups to −∞."""
        if self.op.groups == 1:
            return score_TE
        best_TG = self._groups(score_TE)
        kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        kept_TG.scatter_(1, _largest(best_TG, self.op.kept), True)
        return score_TE.masked_fill(~self._inside(kept_TG, score_TE.shape[1]), -math.inf)

    def _good(self, score_TE: Tensor, chosen_TK: Tensor, slack_T: Tensor) -> Tensor:
        """Whether `chosen` are the largest scores, in order, within `slack`: `[T]`."""
        experts, off_T1 = score_TE.shape[1], 2 * slack_T[:, None]
        real_TK = chosen_TK.clamp(0, experts - 1)
        apart_T = (chosen_TK.sort(1).values.diff(dim=1) > 0).all(1)
        good_T = apart_T & (real_TK == chosen_TK).all(1)
        certain_TE = torch.ones_like(score_TE, dtype=torch.bool)
        if self.op.groups > 1:
            best_TG = self._groups(score_TE)
            least_T1 = best_TG.sort(1, descending=True).values[:, self.op.kept - 1, None]
            possible_TG = best_TG >= least_T1 - off_T1
            tied_T1 = possible_TG.sum(1, keepdim=True) > self.op.kept
            certain_TG = torch.where(tied_T1, best_TG > least_T1 + off_T1, possible_TG)
            used_TG = torch.zeros_like(possible_TG)
            used_TG.scatter_(1, real_TK // (experts // self.op.groups), True)
            good_T &= (possible_TG | ~used_TG).all(1) & (used_TG.sum(1) <= self.op.kept)
            certain_TE = self._inside(certain_TG, experts)
        picked_TK = score_TE.gather(1, real_TK)
        others_TE = score_TE.masked_fill(~certain_TE, -math.inf).scatter(1, real_TK, -math.inf)
        refused_T1 = others_TE.amax(1, keepdim=True)
        good_T &= (picked_TK[:, 1:] <= picked_TK[:, :-1] + off_T1).all(1)
        return good_T & (picked_TK >= refused_T1 - off_T1).all(1)


class Weigh(Rule[routing.Weigh]):
    """`g = P[e]`: the weight of each chosen expert."""

    def tensor(self, values: Numbers) -> Tensor:
        """The scores of the chosen, or their softmax; divided by their sum; times the scale."""
        picked_TK = self._picked(values)
        if self.op.softmax:
            picked_TK = softmax(picked_TK)
        elif self.op.renormalized:
            picked_TK = picked_TK / (picked_TK.sum(-1, keepdim=True) + self.op.least)
        return picked_TK * self._factor(values)

    def _factor(self, values: Numbers) -> Tensor | float:
        """The final factor on the weights: `[T, K]`, or one number."""
        if self.op.factors is None:
            return self.op.scale
        c_E = values.vector(self.op.factors)
        return self.op.scale * c_E[values[self.op.chosen].long()]

    def magnitudes(self, values: Numbers) -> Tensor:
        """Zero for a copy, the result for a quotient; a softmax as in `Share`."""
        if self.op.softmax:
            return uncertainty(self._picked(values)) * self._factor(values)
        copied = not self.op.renormalized and self.op.scale == 1 and self.op.factors is None
        return torch.zeros(1, dtype=torch.float64) if copied else self.tensor(values).abs()

    def _compute(self, read: Reader) -> Number:
        op, values, (token, place) = self.op, read.values, read.index
        chosen_K = values[op.chosen][token].long().tolist()
        expert, row = chosen_K[place], self._picked(values)[token].tolist()
        own = read.at(op.source, token, expert)
        read.follow.append((op.chosen, read.index))
        choice = self.cell(op.chosen, token, "j")

        def cell(at: int | str) -> str:
            """Of the running index; of a place among the chosen."""
            inside = choice if at == "j" else self.cell(op.chosen, token, at)
            return symbol(self.letter_of(op.source), token, inside)

        if op.softmax:
            own = share(read, dict(enumerate(row)), place, cell, "j")
            own = own if op.scale == 1 and op.factors is None else own.line("a")
        if op.factors is not None:
            own = read.stored(op.factors, expert) * own
        made = own if op.scale == 1 else op.scale * own
        if not op.renormalized or op.softmax:
            return made
        terms = tuple(
            Term(at=j, parts=(), value=x, label=f"expert {e}")
            for j, (e, x) in enumerate(zip(chosen_K, row, strict=True))
        )
        return made / read.summed(cell("j"), terms, "j")

    def _picked(self, values: Numbers) -> Tensor:
        return values[self.op.source].gather(-1, values[self.op.chosen].long())


class WeighInput(Rule[routing.WeighInput]):
    """`Xₑ[k] = g[k] · X`: the input of each chosen expert, `[K, T, D]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Expert by expert."""
        return values[self.op.share].t()[..., None] * values[self.op.source]

    def magnitudes(self, values: Numbers) -> Tensor:
        """The result: one product."""
        return self.tensor(values).abs()

    def _compute(self, read: Reader) -> Number:
        place, token, i = read.index
        x = read.at(self.op.source, token, i)
        return read.at(self.op.share, token, place) * x


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest; the first of equal ones."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]
