"""The settings of a benchmark, each declared once: option, order of the sweep, and column.

`Settings` is one configuration. Its fields are in the order in which llama-bench nests its loops,
the outermost first; `SETTINGS` has the option of each field but the model, and `SweptOptions` is
made of these options. A value goes from there into one `Settings` of each configuration
(`Plan.of`), to the engine, and into a `Row` under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from itertools import accumulate, count, islice, repeat, takewhile
from operator import mul
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError
from llmcli.records.engines import BACKENDS, CACHE_OF, CACHE_TYPES
from llmcli.shell.options import MODEL
from llmcli.shell.params import opt

Weights = tuple[str, str, str, str]  # model, device, dtype, activations
Texts = list[str] | None  # lists and ranges, given once or several times
MOST = 10_000  # values of one option: a typo is quickly that long
LARGEST = 2**31 - 1
_DIGITS = 18  # Python refuses to read thousands of them
_RANGE = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)


def numbers(
    option: str, given: Sequence[str], *, low: int = 0, high: int = LARGEST
) -> tuple[int, ...]:
    """`16,32`, `1-4`, `1-9+2`, `1-8*2`, or several of these: the values in the order given.

    Raises UsageError for other texts and for values that are out of bounds.
    """
    found: list[int] = []
    for text in given:
        for part in text.split(","):
            found += _range(option, part, high)
            if len(found) > MOST:
                raise UsageError(f"`{option} {text}` are more than {MOST:,} values")
    for value in found:
        if not low <= value <= high:
            bounds = f"at least {low}" if value < low else f"at most {high}"
            raise UsageError(f"`{option}` must be {bounds}, not `{value}`")
    return tuple(found)


def _range(option: str, part: str, most: int) -> list[int]:
    match = _RANGE.fullmatch(part.strip())
    if not part.strip():
        raise UsageError(f"`{option}` has an empty value", hint=f"write `{option} 16,32`")
    if match is None:
        raise UsageError(
            f"`{option}` takes numbers, not `{part}`",
            hint=f"write `{option} 16,32`, `1-4`, `1-9+2` or `1-8*2`",
        )
    for digits in filter(None, match.group(1, 2, 4)):
        if len(digits) > _DIGITS:
            raise UsageError(f"`{option}` must be at most {most}, not `{digits[:_DIGITS]}…`")
    value, last = int(match[1]), int(match[2] or match[1])
    step, multiply = int(match[4] or 1), match[3] == "*"
    if last < value:
        raise UsageError(f"`{option} {part}` ends before it begins")
    if last > value and (step < 1 or (multiply and (step < 2 or value < 1))):
        raise UsageError(f"the steps of `{option} {part}` never reach its end")
    if last == value:
        return [value]
    following = accumulate(repeat(step), mul, initial=value) if multiply else count(value, step)
    return list(islice(takewhile(lambda one: one <= last, following), MOST + 1))


def words(
    option: str, given: Sequence[str], choices: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Words separated by commas; `choices` maps spellings to values. Raises UsageError."""
    texts = [part.strip() for text in given for part in text.split(",")]
    for text in texts:
        if not text:
            raise UsageError(f"`{option}` has an empty value")
        if choices and text not in choices:
            listed = ", ".join(dict.fromkeys(choices.values()))
            raise UsageError(f"`{option}` has no choice `{text}`", hint=f"choose from {listed}")
    return tuple(choices[text] if choices else text for text in texts)


def _devices(option: str, given: Sequence[str]) -> tuple[str, ...]:
    """Our names for devices of ours or of llama.cpp; unknown ones stay as they are.

    Several that share the layers are separated by `/`, as in llama-bench.
    """
    ours = {"none": "cpu", "metal": "mps", "mtl0": "mps", "cuda:": "cuda"}

    def named(text: str) -> str:
        name = re.sub(r"^cuda:?(?=\d+$)", "cuda:", text.lower())
        return ours.get(name, name)

    return tuple(",".join(map(named, text.split("/"))) for text in words(option, given))


def device_words(device: str) -> str:
    """llama-bench's name of a device: `CUDA0`, `none` (the CPU alone), `auto` …"""
    if "," in device:
        return "/".join("CPU" if one == "cpu" else device_words(one) for one in device.split(","))
    if device == "cpu":
        return "none"
    kind, _, index = device.partition(":")
    return f"CUDA{index or 0}" if kind == "cuda" else BACKENDS["mps"] if kind == "mps" else device


def _choice(*choices: str) -> Callable[..., tuple[str, ...]]:
    return partial(words, choices={choice: choice for choice in choices})


def _flags(option: str, given: Sequence[str]) -> tuple[bool, ...]:
    return tuple(text == "1" for text in _choice("0", "1")(option, given))


_cache_type = _choice("auto", *dict.fromkeys((*CACHE_OF.values(), *CACHE_TYPES)))
_SPELLINGS = {
    "on": ("on", "enabled", "true", "1"),
    "off": ("off", "disabled", "false", "0"),
    "auto": ("auto", "-1"),
}
_flash = partial(words, choices={text: way for way, all_ in _SPELLINGS.items() for text in all_})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The option of one setting, and its column in tables.

    `spelled`: its names, the long one last, and what the value is called.
    `read(option, given)` returns the values of an option that was given. `column`: the field of a
    row that shows it, if it has another name. `heading` and `width`: what tables call that field,
    and its width in llama-bench's table, below 0 if aligned left; empty and 0 for the usual ones.
    """

    spelled: str
    help: str
    read: Callable[[str, Sequence[str]], tuple[Any, ...]]
    panel: str | None = None
    column: str = ""
    heading: str = ""
    width: int = 0

    @property
    def option(self) -> str:
        """The long name, with its dashes."""
        return self.spelled.split()[-2]

    @property
    def name(self) -> str:
        """The long name as the options have it: `batch_size`."""
        return self.option.lstrip("-").replace("-", "_")


def _setting(default: Any, spelled: str, help: str, **more: Any) -> Any:
    """A field of `Settings`, with its option and column (`more`: further fields of `Setting`)."""
    setting = Setting(spelled=spelled, help=help, **more)
    return field(default=default, metadata={"setting": setting})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One configuration of a sweep: what the options request, in our words.

    `model` as the user named it. Settings that are not supported stay as requested: they make the
    row an error. `device` is `auto`, `cpu`, `cuda:0` or `meta`; `activations` are their bits.
    """

    model: str
    n_gpu_layers: int = _setting(
        -1,
        "-ngl --n-gpu-layers N",
        "Layers on the GPU; -1 for all. [default: -1]",
        read=partial(numbers, low=-1),
        heading="ngl",
        width=3,
    )
    device: str = _setting(
        "auto",
        "-dev --device DEVICE",
        "auto, cpu (or none), cuda:0 (or CUDA0), mps, cuda:0/cpu for layers on both, or meta: no "
        "weights, memory and FLOPs only. [default: auto]",
        read=_devices,
        panel=MODEL,
        column="devices",
        heading="dev",
        width=-12,
    )
    dtype: str = _setting(
        "auto",
        "--dtype DTYPE",
        "Arithmetic: auto, float64, float32, bfloat16 or float16. [default: auto]",
        read=_choice("auto", "float64", "float32", "bfloat16", "float16"),
        panel=MODEL,
    )
    activations: str = _setting(
        "auto",
        "--activations BITS",
        "Bits of activations in products with packed weights: auto, 16 or 8. [default: auto, which "
        "is 16; beside llama.cpp, whose are 8, both]",
        read=_choice("auto", "16", "8"),
        panel=MODEL,
        column="product_format",
        heading="products",
    )
    embeddings: bool = _setting(
        False,
        "-embd --embeddings 0|1",
        "Embeddings instead of logits. [default: 0]",
        read=_flags,
        heading="embd",
    )
    n_batch: int = _setting(
        2048,
        "-b --batch-size N",
        "Prompt tokens submitted at once (logical batch). [default: 2048]",
        read=partial(numbers, low=1),
        width=7,
    )
    n_ubatch: int = _setting(
        512,
        "-ub --ubatch-size N",
        "Prompt tokens computed at once (physical batch). [default: 512]",
        read=partial(numbers, low=1),
        width=8,
    )
    type_k: str = _setting(
        "auto",
        "-ctk --cache-type-k TYPE",
        "Dtype of cached keys: f32, f16, bf16 … [default: that of the arithmetic]",
        read=_cache_type,
        width=6,
    )
    type_v: str = _setting(
        "auto",
        "-ctv --cache-type-v TYPE",
        "Dtype of cached values.",
        read=_cache_type,
        width=6,
    )
    no_kv_offload: bool = _setting(
        False,
        "-nkvo --no-kv-offload 0|1",
        "Keep the cache off the GPU. [default: 0]",
        read=_flags,
        heading="nkvo",
    )
    flash_attn: str = _setting(
        "auto",
        "-fa --flash-attn on|off|auto",
        "Fused attention. [default: auto]",
        read=_flash,
        heading="fa",
        width=2,
    )
    n_threads: int = _setting(
        0,
        "-t --threads N",
        "CPU threads. [default: OMP_NUM_THREADS, else one per core]",
        read=partial(numbers, low=1, high=4096),
        panel=MODEL,
        heading="threads",
        width=7,
    )

    @property
    def placed(self) -> str:
        """`device`, and `cpu` for llama-bench's `-ngl 0` where none is named."""
        return "cpu" if self.device == "auto" and self.n_gpu_layers == 0 else self.device

    @property
    def chunk(self) -> int:
        """Tokens of one forward call: `n_ubatch`, which is at most `n_batch` (llama.cpp's rule)."""
        return min(self.n_ubatch, self.n_batch)

    @property
    def weights(self) -> Weights:
        """What a loaded model depends on."""
        return self.model, self.placed, self.dtype, self.activations


SETTINGS: dict[str, Setting] = {
    one.name: replace(
        setting,
        column=setting.column or one.name,
        heading=setting.heading or setting.column or one.name,
    )
    for one in fields(Settings)
    if (setting := one.metadata.get("setting"))
}

if TYPE_CHECKING:
    SweptOptions = Any
else:
    SweptOptions = make_dataclass(
        "SweptOptions",
        [
            (one.name, Texts, opt(None, one.spelled, one.help, panel=one.panel))
            for one in SETTINGS.values()
        ],
        namespace={"panel": "Swept (lists as for tests)"},
        frozen=True,
        kw_only=True,
    )
