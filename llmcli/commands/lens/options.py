"""What `llmcli lens` can be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.cli.looking import check_span, parse_numbers
from llmcli.cli.params import opt
from llmcli.commands.lens.files import FILES
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.commands.lens.measure.reader import Target
    from llmcli.commands.lens.report import LensReport
    from llmcli.config import ModelConfig
    from llmcli.text import Tokenizer

LENS = "Lens"


@dataclass(frozen=True, kw_only=True)
class LensOptions:
    """Which cells, how many tokens of each, whose rank, and where the file goes."""

    panel: ClassVar[str] = LENS
    position: str | None = opt(
        None, "--position", "SPAN",
        "Positions such as 40:48, :10, -5: or -1; one alone is shown with everything about it. "
        "[default: on the screen the last that fit, else all]",
    )  # fmt: skip
    layer: str | None = opt(
        None, "--layer", "LAYERS",
        "Layers such as 0,3-5,-1; the last one is always there. [default: the embedding and all]",
    )  # fmt: skip
    mid: bool = opt(
        False, "--mid",
        "Also inside a layer, between attention and feed-forward part (resid_mid).",
    )  # fmt: skip
    top: int = opt(
        5, "-k", "--top", "K",
        "Likeliest tokens of a cell: shown for a single position, in JSON and files.",
        at_least=1, at_most=1000,
    )  # fmt: skip
    target: str = opt(
        "output", "--target", "TOKEN|next|output",
        "The token whose rank is followed: one of the vocabulary (quoted where it is called next "
        "or output, an id without a tokenizer), the text's next one, or the likeliest of the "
        "model's output. But for the last, cells show ranks.",
    )  # fmt: skip
    save: str | None = opt(
        None, "-o", "--output", "FILE",
        f"Also write all cells to a file, by its ending: {', '.join(FILES)}.",
    )  # fmt: skip
    force: bool = opt(False, "--force", "Write a file however large it gets.")

    def check(self, config: ModelConfig) -> None:
        """Refuses, before the weights are read, what is wrong whatever the tokens are."""
        self.layers(len(config.layers))
        if self.position is not None:
            check_span(self.position, "--position")

    def layers(self, count: int) -> tuple[int, ...] | None:
        """The chosen ones of so many, None for all. Raises UsageError."""
        if self.layer is None:
            return None
        return parse_numbers(self.layer, count, "--layer", "layers")


def parse_target(text: str, tokenizer: Tokenizer | None, vocabulary: int) -> Target:
    """`output`, `next`, a token of the vocabulary (which may stand in quotes), or its id.

    An id is meant only where there is no tokenizer. Raises UsageError for anything else.
    """
    if text == "output":
        return "output"
    if text == "next":
        return "next"
    if tokenizer is None:
        if re.fullmatch(r"\d{1,9}", text, re.ASCII) and int(text) < vocabulary:
            return int(text)
        raise UsageError(
            f"`--target {text}`: the model has no tokenizer, so it takes an id, next or output",
            hint=f"ids go from 0 to {vocabulary - 1}",
        )
    token = _unquoted(text)
    ids = tokenizer.encode(token, add_bos=False)
    if len(ids) == 1:
        return ids[0]
    split = ", ".join(f"`{tokenizer.token_text(id)}`" for id in ids[:8])
    spaced = tokenizer.encode(f" {token}", add_bos=False)
    raise UsageError(
        f"`--target {text}` is {len(ids)} tokens, not one" + (f": {split}" if ids else ""),
        hint=f'did you mean `--target " {token}"`? a word in a text begins with its space'
        if len(spaced) == 1 and token
        else "give one of them; a word in a text usually begins with its space",
    )


def space_note(
    text: str, target: int, report: LensReport, tokenizer: Tokenizer | None
) -> str | None:
    """What is to be known of a target that with a space before it is another token, else None.

    Words in a text begin with their space: that one may be what was meant.
    """
    token = _unquoted(text)
    if tokenizer is None or token.startswith(" "):
        return None
    spaced = tokenizer.encode(f" {token}", add_bos=False)
    if len(spaced) != 1 or spaced[0] == target:
        return None
    likeliest = {cell.top[0].id for cell in report.rows[-1].cells}
    here = ", and the output's likeliest here" if spaced[0] in likeliest else ""
    return (
        f'`--target {text}` is the token without a space; `--target " {token}"` is another one'
        f"{here}"
    )


def _unquoted(text: str) -> str:
    inside = re.fullmatch(r"(['\"])(.+)\1", text, re.DOTALL)
    return inside[2] if inside else text
