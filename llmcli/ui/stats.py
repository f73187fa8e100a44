"""What a model is, and what its draft did, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from llmcli.records.numbers import counted
from llmcli.ui.layout import SEPARATOR
from llmcli.ui.numbers import duration as duration
from llmcli.ui.numbers import size as size
from llmcli.ui.theme import CONFIDENCE, FAINT

SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


def draft_words(drafted: Mapping[str, Any]) -> str:
    """`61 of 96 tokens right (64 %), 1.80 times as fast`, of the `speculation` of a document.

    Ends with `: turned off` where the draft made the text slower.
    """
    proposed, accepted = drafted["proposed"], drafted["accepted"]
    if not proposed:
        return "proposed nothing"
    words = f"{accepted} of {counted(proposed, 'token')} right ({accepted / proposed:.0%})"
    if drafted["speedup"] is not None:
        words += f", {drafted['speedup']:.2f} times as fast"
    return f"{words}: turned off" if drafted["stopped"] else words


def model_line(model: Mapping[str, Any]) -> str:
    """`smollm2 (Q4_1, Q8_0 → float32 on cpu)` from the `model` object of the JSON documents.

    Of packed weights what else is rounded, too: `(Q4_1 + Q8_0 on cpu: int8 products, …)`.
    """
    used, activations = model["weight_format"], model["activation_format"]
    held = ("F32", SHORT.get(used), *used.split(" + "))
    stored = [name for name in model["stored_formats"] if name not in held]
    formats = f"{', '.join(stored)} → {used}" if stored else used
    how = ""
    if model["product_format"] != activations:
        how = (f": {model['product_format']} products, {activations} activations, "
               f"{model['cache_format']} cache")  # fmt: skip
    return f"{model['name']} ({formats} on {model['device']}{how})"


def confidence_legend(*, ties: bool = False) -> Text:
    """What the colours of `--logprobs` mean; `ties`: and the lines under near ties."""
    legend = Text("probability of each token: ", style=FAINT)
    for position, (_, style, words) in enumerate(CONFIDENCE):
        legend.append((SEPARATOR if position else "") + words, style=style)
    if ties:
        legend.append(SEPARATOR)
        legend.append("near tie: the margin is below rounding", style="underline")
    return legend
