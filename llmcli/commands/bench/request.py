"""From options to what a sweep is made of: configurations and tests, in llama-bench's order."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmcli.commands.bench.options import OurOptions, RunOptions, SubjectOptions, SweptOptions
from llmcli.commands.bench.report.llama_names import CACHE_OF
from llmcli.commands.bench.report.llama_names import CACHE_TYPES as CACHE_NUMBERS
from llmcli.commands.bench.report.results import BenchRequest, Settings, Test
from llmcli.errors import UsageError

_RANGE = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
_DIGITS = 18  # Python refuses to read thousands of them
MOST = 10_000  # values of one option: nobody waits for more, and a typo is quickly that long
LARGEST = 2**31 - 1
_FLAGS = {"0": False, "1": True}

Given = Sequence[str] | None


def numbers(
    option: str,
    given: Given,
    default: Sequence[int],
    *,
    at_least: int = 0,
    at_most: int = LARGEST,
) -> tuple[int, ...]:
    """`16,32`, `1-4`, `1-9+2`, `1-8*2`, or several of these: the values in the order given.

    Raises UsageError for what is none of these, and for values that are out of bounds.
    """
    if given is None:
        return tuple(default)
    found: list[int] = []
    for text in given:
        for part in text.split(","):
            found += _range(option, part, at_most)
            if len(found) > MOST:
                raise UsageError(f"`{option} {text}` are more than {MOST:,} values")
    for value in found:
        if not at_least <= value <= at_most:
            bounds = f"at least {at_least}" if value < at_least else f"at most {at_most}"
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
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    multiply, step = match[3] == "*", int(match[4] or 1)
    if last < first:
        raise UsageError(f"`{option} {part}` ends before it begins")
    found = [first]
    while True:
        value = found[-1] * step if multiply else found[-1] + step
        if value <= found[-1]:
            if last == first:
                return found
            raise UsageError(f"the steps of `{option} {part}` lead nowhere")
        if value > last or len(found) > MOST:
            return found
        found.append(value)


def pairs(option: str, given: Given) -> tuple[tuple[int, int], ...]:
    """`512,128` of every `-pg`: a prompt, and tokens after it. Raises UsageError."""
    found = []
    for text in given or ():
        parts = text.split(",")
        if len(parts) != 2:
            raise UsageError(
                f"`{option}` takes two numbers, not `{text}`",
                hint=f"write `{option} 512,128`, once for each pair",
            )
        for part in parts:
            if not re.fullmatch(r"\d+", part.strip(), re.ASCII):
                raise UsageError(
                    f"`{option}` takes two numbers and no ranges, not `{text}`",
                    hint=f"write `{option} 512,128`, once for each pair",
                )
        (prompt,), (new,) = (numbers(option, [part], ()) for part in parts)
        found.append((prompt, new))
    return tuple(found)


def flags(option: str, given: Given, default: bool) -> tuple[bool, ...]:
    """`0`, `1`, or `0,1`. Raises UsageError."""
    texts = [part.strip() for text in given or () for part in text.split(",")]
    for text in texts:
        if text not in _FLAGS:
            raise UsageError(f"`{option}` takes 0 or 1, not `{text}`")
    return tuple(_FLAGS[text] for text in texts) or (default,)


def words(
    option: str,
    given: Given,
    default: str,
    *,
    allowed: Sequence[str] = (),
) -> tuple[str, ...]:
    """Names separated by commas; only those `allowed`, where any are. Raises UsageError."""
    texts = [part.strip() for text in given or () for part in text.split(",")]
    for text in texts:
        if not text:
            raise UsageError(f"`{option}` has an empty value")
        if allowed and text not in allowed:
            raise UsageError(
                f"`{option}` has no choice `{text}`", hint=f"choose from {', '.join(allowed)}"
            )
    return tuple(texts) or (default,)


MOST_ROWS = 100_000
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
CACHE_TYPES = ("auto", *dict.fromkeys((*CACHE_OF.values(), *CACHE_NUMBERS)))
_FLASH = {
    "on": ("on", "enabled", "true", "1"),
    "off": ("off", "disabled", "false", "0"),
    "auto": ("auto", "-1"),
}


def bench_request(
    models: tuple[str, ...],
    *,
    threads: int,
    tests: SubjectOptions,
    swept: SweptOptions,
    runs: RunOptions,
    ours: OurOptions,
) -> BenchRequest:
    """Every combination of the options' values, models outermost. Raises UsageError.

    `threads` are those of a run without `--threads`.
    """
    default = Settings(
        model=models[0],
        device="auto",
        dtype="auto",
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        type_k="auto",
        type_v="auto",
        n_gpu_layers=-1,
        flash_attn="auto",
        no_kv_offload=False,
        embeddings=False,
    )
    axes = {"model": models, **_axes(swept, default)}
    both = ours.against == "llama.cpp" and swept.activations is None
    if both:
        axes["activations"] = ("auto", "8")
    found = _tests(tests, math.prod(map(len, axes.values())))
    return BenchRequest(
        configurations=tuple(
            replace(default, **dict(zip(axes, values, strict=True)))
            for values in itertools.product(*axes.values())
        ),
        tests=found,
        default=default,
        repetitions=runs.repetitions,
        warmup=not runs.no_warmup,
        delay_s=runs.delay,
        seed=ours.seed,
        against=ours.against,
        like_for_like=both,
        ceilings=not ours.no_ceilings,
        random_weights=ours.random_weights,
        quantize=ours.quantize,
        revision=ours.revision,
        offline=ours.offline,
        verbose=runs.verbose,
    )


def model_names(options: SubjectOptions) -> tuple[str, ...]:
    """The models that are named, those of `-hf` last; none where the default one is meant."""
    named = [] if options.model is None else [*words("--model", options.model, "")]
    repositories = [] if options.hf_repo is None else [*words("--hf-repo", options.hf_repo, "")]
    files = [] if options.hf_file is None else [*words("--hf-file", options.hf_file, "")]
    if len(files) > len(repositories):
        raise UsageError("`--hf-file` goes with a `--hf-repo`", hint="name the repository, too")
    for repository, file in itertools.zip_longest(repositories, files):
        if ":" in repository:
            raise UsageError(
                f"`--hf-repo {repository}` names no file", hint="name it with `--hf-file`"
            )
        named.append(f"hf:{repository}" + (f"/{file}" if file else ""))
    return tuple(named)


def _tests(tests: SubjectOptions, configurations: int) -> tuple[Test, ...]:
    """At each depth all prompts, then all texts, then all of both; one of 0 tokens is none.

    Counted before they are made: three lists of thousands are more than memory holds.
    """
    prompts = numbers("--n-prompt", tests.n_prompt, (512,))
    texts = numbers("--n-gen", tests.n_gen, (128,))
    depths = numbers("--n-depth", tests.n_depth, (0,))
    both = pairs("-pg", tests.n_pg)
    each = sum(map(bool, prompts)) + sum(map(bool, texts)) + sum(map(any, both))
    rows = configurations * len(depths) * each
    if rows > MOST_ROWS:
        raise UsageError(
            f"these are {rows:,} tests, and no more than {MOST_ROWS:,} can be run",
            hint="shorten the lists",
        )
    if not rows:
        raise UsageError(
            "all tests have 0 tokens", hint="give `--n-prompt`, `--n-gen` or `-pg` a number"
        )
    return all_tests(prompts, texts, both, depths)


def all_tests(
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int] = (0,),
) -> tuple[Test, ...]:
    """At each depth all prompts, then all generations, then all pairs of both; 0 is no test."""
    found = []
    for depth in depths:
        both = [(n, 0) for n in n_prompt] + [(0, n) for n in n_gen] + list(pairs)
        found += [Test(n_prompt=p, n_gen=g, depth=depth) for p, g in both if p or g]
    return tuple(found)


def _axes(swept: SweptOptions, default: Settings) -> dict[str, Any]:
    """The values of every field but the model, outermost first: the order of llama-bench."""
    return {
        "n_gpu_layers": numbers("--n-gpu-layers", swept.n_gpu_layers, (-1,), at_least=-1),
        "device": tuple(map(_device, words("--device", swept.device, "auto"))),
        "dtype": words("--dtype", swept.dtype, "auto", allowed=DTYPES),
        "activations": words(
            "--activations", swept.activations, "auto", allowed=("auto", "16", "8")
        ),
        "embeddings": flags("--embeddings", swept.embeddings, False),
        "n_batch": numbers("--batch-size", swept.batch_size, (default.n_batch,), at_least=1),
        "n_ubatch": numbers("--ubatch-size", swept.ubatch_size, (default.n_ubatch,), at_least=1),
        "type_k": words("--cache-type-k", swept.cache_type_k, "auto", allowed=CACHE_TYPES),
        "type_v": words("--cache-type-v", swept.cache_type_v, "auto", allowed=CACHE_TYPES),
        "no_kv_offload": flags("--no-kv-offload", swept.no_kv_offload, False),
        "flash_attn": tuple(map(_flash, words("--flash-attn", swept.flash_attn, "auto"))),
        "n_threads": numbers(
            "--threads", swept.threads, (default.n_threads,), at_least=1, at_most=4096
        ),
    }


def _device(text: str) -> str:
    """Our name for a device of ours or of llama.cpp; what it does not know stays as it is."""
    name = text.lower()
    if cuda := re.fullmatch(r"cuda:?(\d*)", name):
        return f"cuda:{cuda[1]}" if cuda[1] else "cuda"
    return {"none": "cpu", "metal": "mps", "mtl0": "mps"}.get(name, name)


def _flash(text: str) -> str:
    for way, spellings in _FLASH.items():
        if text in spellings:
            return way
    raise UsageError(
        f"`--flash-attn` has no choice `{text}`", hint=f"choose from {', '.join(_FLASH)}"
    )
