"""What recurrent mixers keep, in words."""

from __future__ import annotations

from llmcli.records.info import StateNeed
from llmcli.ui.stats import size


def state_words(states: StateNeed) -> list[str]:
    """What recurrent mixers keep, and from where on that is less than keys and values."""
    layers = f"{states.layers} layer{'s' * (states.layers > 1)}"
    other = {
        "attention": "of as many of its attention layers",
        "same_size": "of softmax attention whose keys and values are as large as theirs",
    }[states.against]
    return [
        f"states: {size(states.bytes)} of each sequence in {layers}",
        "0 B a token",
        f"less than keys and values {other} from {states.smaller_from:,} tokens on",
    ]
