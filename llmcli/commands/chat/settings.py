"""How answers are drawn, and what `/set` changes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.cli.params import Range
from llmcli.cli.sampling import RANGES, valid
from llmcli.errors import UsageError
from llmcli.ui.theme import one_line

if TYPE_CHECKING:
    from llmcli.generation.sampling import Sampling

_WHOLE: Mapping[str, Range] = {"max_tokens": Range(1), "seed": Range(0)}
NAMES = (*RANGES, *_WHOLE)


@dataclass(kw_only=True)
class Settings:
    """How the next answer is drawn; `/set` changes it."""

    sampling: dict[str, float]
    seed: int
    max_tokens: int
    stop: tuple[str, ...] = ()

    def drawn(self) -> Sampling:
        """What the engine takes."""
        from llmcli.generation.sampling import Sampling

        values = {name: value for name, value in self.sampling.items() if name != "top_k"}
        return Sampling(top_k=int(self.sampling["top_k"]), seed=self.seed, **values)

    def change(self, name: str, value: Any, text: str) -> None:
        """Sets one of `NAMES` to a value that was typed as `text`; raises UsageError."""
        if name in RANGES:
            if not valid(name, value):
                raise _wrong(name, value, text, RANGES[name], whole=name == "top_k")
            self.sampling[name] = value
        else:
            if not isinstance(value, int) or isinstance(value, bool) or value not in _WHOLE[name]:
                raise _wrong(name, value, text, _WHOLE[name], whole=True)
            setattr(self, name, value)

    def rows(self) -> dict[str, str]:
        """Every setting of `NAMES` and its value."""
        sampling = {name: f"{value:g}" for name, value in self.sampling.items()}
        return {**sampling, **{name: str(getattr(self, name)) for name in _WHOLE}}


def _wrong(name: str, value: Any, text: str, allowed: Range, *, whole: bool) -> UsageError:
    """`must be at least 1, not `0``, and what kind of number where that is what is wrong."""
    words, number = str(allowed), isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (whole and value != int(value)):
        of = "of " * words.startswith("at least")
        words = f"a {'whole ' * whole}number {of}{words}"
    return UsageError(f"`{name}` must be {words}, not `{one_line(text)}`")
