"""What `selftest` found: checks that pass or fail, and rates that are compared with ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmcli.records.document import APART, ViewCheck, derived
from llmcli.records.machine import Ceilings, Environment

if TYPE_CHECKING:
    from llmcli.graph.spec import Phase


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """One property over `cases` (small models, levels or runs): `check` is that of the worst."""

    check: ViewCheck = field(metadata=APART)
    cases: int
    seconds: float

    @derived
    def name(self) -> str:
        """The name of its check."""
        return self.check.name


@dataclass(frozen=True, kw_only=True)
class RateResult:
    """Decode or prefill of a model with a real one's sizes and random weights.

    `share` of the read rate (decode: bytes of weights and cache that a token reads) or of the
    matrix rate (prefill), both measured in turns with it. `layers` of `all_layers` were run, and
    the time of the others is that of these. `versus`: how many times transformers' rate, None where
    it is not installed or was not run.
    """

    shape: str
    phase: Phase
    format: str
    tokens_per_s: float
    share: float
    layers: int
    all_layers: int
    versus: float | None = None

    @property
    def words(self) -> str:
        """`8B`, or `8B, 4 of 32 layers`."""
        part = self.layers != self.all_layers
        return f"{self.shape}, {self.layers} of {self.all_layers} layers" if part else self.shape


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """Bytes that a run of a real model's sizes was estimated to take, and that it took."""

    shape: str
    estimated: int
    measured: int | None


@dataclass(frozen=True, kw_only=True)
class SelftestReport:
    """The result of `selftest`; `refused`: what could not be run on this machine, and why."""

    device: str
    groups: tuple[GroupResult, ...]
    rates: tuple[RateResult, ...]
    memory: tuple[MemoryResult, ...]
    ceilings: Ceilings | None
    refused: tuple[str, ...]
    seconds: float

    @property
    def checks(self) -> tuple[ViewCheck, ...]:
        """The checks of all groups."""
        return tuple(group.check for group in self.groups)


SLOWER = 0.8  # of a receipt's rate: less than that is a difference


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A file of an earlier run: which checks passed, and tokens/s by shape and phase."""

    processor: str
    gpus: tuple[str, ...]
    device: str
    passed: Mapping[str, bool]
    rates: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, document: Any) -> Receipt:
        """Raises ValueError for what is no receipt of `selftest`."""
        try:
            if document["schema"] != "llmcli.selftest/1":
                raise ValueError("it is no receipt of `llmcli selftest`")
            machine = document["environment"]
            return cls(
                processor=str(machine["processor"]),
                gpus=tuple(map(str, machine["gpus"])),
                device=str(document["device"]),
                passed={str(name): bool(one["ok"]) for name, one in document["checks"].items()},
                rates={
                    (str(rate["shape"]), str(rate["phase"])): float(rate["tokens_per_s"])
                    for rate in document["rates"]
                },
            )
        except KeyError as error:
            raise ValueError(f"it lacks {error}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError("it has another form") from error


def compare(receipt: Receipt, report: SelftestReport, machine: Environment) -> list[str]:
    """List what is worse now: checks that fail, and rates of the same machine below `SLOWER`."""
    same = (receipt.processor, receipt.gpus) == (machine.processor, machine.gpus)
    found = [
        f"{check.name} passed in the receipt and fails now"
        for check in report.checks
        if receipt.passed.get(check.name) and not check.ok
    ]
    names = {check.name for check in report.checks}
    found += [f"{name} was not checked now" for name in receipt.passed if name not in names]
    for rate in report.rates if same else ():
        before = receipt.rates.get((rate.shape, rate.phase))
        if before and rate.tokens_per_s < SLOWER * before:
            found.append(
                f"{rate.shape} {rate.phase}: {rate.tokens_per_s:,.1f} tok/s, {before:,.1f} then"
            )
    return found
