"""What several views say of a model, its letters, its draft and its memory, and of the machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from llmcli.records.info import StateNeed
from llmcli.records.machine import Ceilings, Environment
from llmcli.records.numbers import counted
from llmcli.ui.layout import SEPARATOR
from llmcli.ui.numbers import size, unit
from llmcli.ui.theme import CONFIDENCE, FAINT, one_line

SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
SURELY = 1.1  # of a ceiling: more than that is not how one measurement differs from another

# letter → words for so many of them, and the other names of the same size
LETTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "b": ("sequences", ()),
    "n": ("tokens", ("N",)),
    "d": ("width", ("d_model", "hidden_dim")),
    "h": ("heads", ("A", "n_heads")),
    "h_kv": ("heads of keys and values", ("n_kv_heads",)),
    "h_k": ("heads of queries and keys", ()),
    "d/h": ("a head", ("d_k", "d_v", "head_dim")),
    "d_k": ("a head", ("d_v", "head_dim")),  # where h heads are not d wide
    "d_v": ("a value", ()),
    "F": ("neurons", ()),
    "Fₛ": ("neurons of the shared expert", ()),
    "Fₑ": ("neurons of an expert", ()),
    "E": ("experts", ()),
    "K": ("chosen experts", ()),
    "v": ("in the vocabulary", ("vocab_size",)),
    "layers": ("", ("blocks",)),
}
# axes of tensors → words for so many of them
AXES = {
    "B": "sequences",
    "T": "new tokens",
    "S": "tokens so far",
    "D": "width",
    "De": "numbers of a token's embedding",
    "H": "heads",
    "Hk": "heads of keys and values",
    "dh": "a head's query and key",
    "dv": "a head's value",
    "F": "neurons",
    "Fs": "neurons of the shared expert",
    "Fe": "neurons of an expert",
    "E": "experts",
    "K": "of them that a token chooses",
    "V": "in the vocabulary",
    "P": "learned positions",
    "dn": "of these for content",
    "dr": "of these rotated",
    "dc": "a token's latent of keys and values",
    "dq": "a token's latent of queries",
    "dk": "a head's query and key",
    "C": "channels of a convolution",
    "G": "groups of heads that share queries and keys",
    "N": "a group's query and key",
    "L": "tokens that a convolution sees",
    "W": "of them before the last",
    "Lp": "layers",
    "Dp": "numbers of a token's embedding for each",
    "Vp": "tokens with such embeddings",
}


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
        how = (
            f": {model['product_format']} products, {activations} activations, "
            f"{model['cache_format']} cache"
        )
    edits = [one["edit"] for one in model.get("edits", ())]
    edited = f", edited: {', '.join(edits)}" if edits else ""
    return f"{model['name']} ({formats} on {model['device']}{how}){edited}"


def score_number(value: float, why: str = "") -> str:
    """Of a score: four decimals, of large numbers fewer: six digits say it all."""
    if math.isnan(value):
        return f"undefined{why}"
    if math.isinf(value):
        return str(value)  # `inf`, `-inf`, as in the table
    digits = len(str(int(abs(value))))
    return f"{value:.6g}" if digits > 9 else f"{value:.{min(4, max(0, 6 - digits))}f}"


def confidence_legend(*, ties: bool = False) -> Text:
    """What the colours of `--logprobs` mean; `ties`: and the lines under near ties."""
    legend = Text("probability of each token: ", style=FAINT)
    for position, (_, style, words) in enumerate(CONFIDENCE):
        legend.append((SEPARATOR if position else "") + words, style=style)
    if ties:
        legend.append(SEPARATOR)
        legend.append("near tie: the margin is below rounding", style="underline")
    return legend


def state_words(states: StateNeed) -> list[str]:
    """What recurrent mixers keep, and from where on that is less than keys and values."""
    layers = counted(states.layers, "layer")
    other = {
        "attention": "of as many of its attention layers",
        "same_size": "of softmax attention whose keys and values are as large as theirs",
    }[states.against]
    return [
        f"states: {size(states.bytes)} of each sequence in {layers}",
        "0 B a token",
        f"less than keys and values {other} from {states.smaller_from:,} tokens on",
    ]


def environment_words(environment: Environment) -> list[str]:
    """What a measured result depends on: processor, threads and versions, for a line."""
    where = [environment.processor, counted(environment.cores, "core"), *environment.gpus]
    kernels = environment.kernel_level.partition(" (")[0]
    software = [
        f"torch {environment.torch}",
        f"kernels {kernels}",
        f"llmcli {environment.llmcli}",
    ]
    if environment.threads is not None:
        software.insert(1, counted(environment.threads, "thread"))
    return [one_line(words) for words in (*where, *software)]


def ceiling_words(ceilings: Ceilings) -> Iterator[str]:
    """Read rates from memory to the fastest cache, then products by dtype."""
    sizes = {cache.level: cache.bytes for cache in ceilings.caches}
    # the smallest set of a cache is surely in it, the largest of all is surely in none
    fastest = {read.level: read for read in reversed(ceilings.reads)}
    fastest[ceilings.reads[-1].level] = ceilings.reads[-1]
    for level, read in fastest.items():
        held = f" ({size(sizes[level])})" if level in sizes else ""
        yield f"{level}{held} {unit(read.bytes_per_s, 'B/s')}"
    for matrix in ceilings.matrices:
        way = f" ({matrix.way})" if matrix.way not in ("", "direct") else ""
        yield f"{matrix.dtype} matrix products {unit(matrix.flops_per_s, 'FLOP/s')}{way}"


def ceiling_summary(ceilings: Ceilings) -> Iterator[str]:
    """Of memory and of products with weights alone: what decides in most runs."""
    last = ceilings.reads[-1]
    yield f"{last.level} {unit(last.bytes_per_s, 'B/s')}"
    for matrix in ceilings.matrices[:1]:
        yield f"{matrix.dtype} products {unit(matrix.flops_per_s, 'FLOP/s')}"


def beyond(names: Iterable[str]) -> str:
    """A warning that names the parts or tests faster than a ceiling; empty without any."""
    parts = list(names)
    if not parts:
        return ""
    return (
        f"faster than their ceiling: {', '.join(parts)}; another process probably ran while "
        "the ceilings were measured: run it again"
    )


def letter_lines(values: Sequence[tuple[str, int]]) -> Iterator[str]:
    """A line for each letter of one model: F as a multiple of d, a name with one meaning only."""
    sizes = dict(values)
    for letter, value in values:
        number, width = str(value), sizes.get("d", 0)
        if letter == "F" and width and value > width and value % width == 0:
            number = f"{value // width}d = {value}"
        words = _counted(LETTERS[letter][0], (value,))
        others = ", ".join(name for name in LETTERS[letter][1] if name not in sizes)
        parts = (f"{letter} = {number}", words, f"({others})" if others else "")
        yield " ".join(filter(None, parts))


def _counted(words: str, values: Sequence[int]) -> str:
    """`heads of keys and values`, `new tokens`; of one `head of keys and values`, `new token`."""
    return re.sub(r"^(\w+ )?(\w+)s\b", r"\1\2", words) if tuple(values) == (1,) else words


def axis_line(letter: str, documents: str, values: tuple[int, ...], segments: str = "") -> str:
    """`T = 12 new tokens, then 1 (n, N)`: an axis, its sizes, and what the documents call it.

    An axis of `segments` is stated by them: `C = Hk·dk|Hk·dk|H·dv = 64 channels of a convolution`.
    """
    first, later = values, ""
    if letter in "TS":  # one size in each phase
        first, later = values[:1], "".join(f", then {n}" for n in values[1:])
    sizes = "/".join(map(str, first))
    known = LETTERS.get(documents, ("", ()))[1]
    others = [name for name in (documents, *known) if name != letter]
    called = f" ({', '.join(others)})" if others else ""
    words = AXES.get(letter, "")  # of a part that is not known here it is nothing
    named = f"{letter} = {segments}" if segments else letter
    return f"{named} = {sizes} {_counted(words, first)}{later}{called}".rstrip()
