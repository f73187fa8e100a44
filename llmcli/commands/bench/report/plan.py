"""The options of `llmcli bench` and what they plan: every test of every configuration.

llama-bench's options have its names, ours are long ones only. A test goes from `TestOptions` into
one `SpeedTest`, to the engines, and into a `Row` under the same names.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmcli.commands.bench.report.settings import (
    SETTINGS,
    Settings,
    SweptOptions,
    Texts,
    numbers,
    words,
)
from llmcli.errors import UsageError
from llmcli.records.engines import SpeedTest
from llmcli.shell.options import (
    MODEL,
    OFFLINE,
    OUTPUT,
    QUANTIZE,
    REVISION,
    OutputOptions,
    Quantize,
)
from llmcli.shell.params import opt

# llama-bench's options that have no effect here; each takes one value, which is ignored
IGNORED = (
    "-C --cpu-mask --cpu-strict --poll -ncmoe --n-cpu-moe -sm --split-mode -mg --main-gpu "
    "-ts --tensor-split -ot --override-tensor -mmp --mmap -lm --load-mode -dio --direct-io "
    "-nopo --no-op-offload --no-host -fitt --fit-target -fitc --fit-ctx -rpc --rpc --numa --prio"
)
MOST_ROWS = 100_000

FormatName = Literal["csv", "json", "jsonl", "md", "sql", "none"]


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """What is measured, on which models."""

    panel: ClassVar[str] = "Tests"
    model: Texts = opt(
        None,
        "-m --model MODEL",
        "A catalog name (smollm2, tiny), a path, or org/name[@rev] on the hub. [default: "
        "$LLMCLI_MODEL, else smollm2]",
        panel=MODEL,
    )
    hf_repo: Texts = opt(None, "-hf -hfr --hf-repo ORG/NAME", "A model on the hub.", panel=MODEL)
    hf_file: Texts = opt(None, "-hff --hf-file FILE", "One file of --hf-repo.", panel=MODEL)
    hf_token: str | None = opt(
        None, "-hft --hf-token TOKEN", "For the hub, instead of $HF_TOKEN.", panel=MODEL
    )
    n_prompt: Texts = opt(
        None,
        "-p --n-prompt N",
        "Prompt lengths in tokens, 0 for none; a list (16,32) or a range (1-4, 1-9+2, 1-8*2). "
        "[default: 512]",
    )
    n_gen: Texts = opt(None, "-n --n-gen N", "Numbers of tokens to generate. [default: 128]")
    n_pg: Texts = opt(
        None, "-pg PP,TG", "A prompt and new tokens after it, in one run; may be repeated."
    )
    n_depth: Texts = opt(
        None, "-d --n-depth N", "Tokens already in the cache when timing starts. [default: 0]"
    )

    def models(self) -> tuple[str, ...]:
        """The models that are named, those of `-hf` last; none for the default model.

        Raises UsageError.
        """
        named = [*words("--model", self.model or ())]
        repositories = words("--hf-repo", self.hf_repo or ())
        files = words("--hf-file", self.hf_file or ())
        if len(files) > len(repositories):
            raise UsageError("`--hf-file` goes with a `--hf-repo`", hint="name the repository, too")
        for repository, file in itertools.zip_longest(repositories, files):
            if ":" in repository:
                raise UsageError(
                    f"`--hf-repo {repository}` names no file", hint="name it with `--hf-file`"
                )
            named.append(f"hf:{repository}" + (f"/{file}" if file else ""))
        return tuple(named)

    def tests(self, configurations: int) -> tuple[SpeedTest, ...]:
        """At each depth all prompts, then all texts, then all pairs; one of 0 tokens is none.

        Counted before they are made: three lists of thousands are more than memory holds. Raises
        UsageError for none and for more than can be run.
        """
        depths = numbers("--n-depth", self.n_depth or ("0",))
        each = [(tokens, 0) for tokens in numbers("--n-prompt", self.n_prompt or ("512",))]
        each += [(0, tokens) for tokens in numbers("--n-gen", self.n_gen or ("128",))]
        each = [both for both in (*each, *pairs(self.n_pg or ())) if any(both)]
        rows = configurations * len(depths) * len(each)
        if rows > MOST_ROWS:
            raise UsageError(
                f"these are {rows:,} tests, and no more than {MOST_ROWS:,} can be run",
                hint="shorten the lists",
            )
        if not rows:
            raise UsageError(
                "all tests have 0 tokens", hint="give `--n-prompt`, `--n-gen` or `-pg` a number"
            )
        return tuple(
            SpeedTest(n_prompt=prompt, n_gen=new, n_depth=depth)
            for depth in depths
            for prompt, new in each
        )


def pairs(given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """`512,128` of every `-pg`: a prompt, and tokens after it. Raises UsageError."""
    found = []
    for text in given:
        parts = text.split(",")
        if not re.fullmatch(r"\s*[0-9]+\s*,\s*[0-9]+\s*", text):
            more = " and no ranges" if len(parts) == 2 else ""
            raise UsageError(
                f"`-pg` takes two numbers{more}, not `{text}`",
                hint="write `-pg 512,128`, once for each pair",
            )
        prompt, new = numbers("-pg", parts)
        found.append((prompt, new))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is measured and shown."""

    panel: ClassVar[str] = "Runs"
    repetitions: int = opt(
        5, "-r --repetitions N", "Runs of each test.", at_least=1, at_most=1_000_000
    )
    delay: float = opt(
        0.0, "--delay SECONDS", "Pause before each test. [default: 0]", at_least=0, at_most=86_400
    )
    no_warmup: bool = opt(False, "--no-warmup", "Skip the warm-up runs.")
    output: FormatName | None = opt(
        None,
        "-o --output FORMAT",
        "Format on stdout (`-o csv > FILE`): csv, json, jsonl, md, sql or none. [default: md]",
    )
    progress: bool = opt(False, "--progress", "A line on stderr for every run.")
    verbose: bool = opt(False, "-v --verbose", "Machine, ceilings and loads on stderr.")
    ignored: Texts = opt(None, f"{IGNORED} VALUE", "Has no effect.", hidden=True)


@dataclass(frozen=True, kw_only=True)
class OurOptions:
    """What llama-bench has not."""

    panel: ClassVar[str] = "Beyond llama-bench"
    against: Literal["transformers", "llama.cpp"] | None = opt(
        None,
        "--against ENGINE",
        "Also measure transformers or llama.cpp on the same weights, alternating their runs.",
    )
    random_weights: bool = opt(
        False,
        "--random-weights",
        "The model from its configuration alone, its weights drawn with --seed.",
    )
    seed: int = opt(
        0, "--seed N", "Seed of the random tokens. [default: 0]", at_least=0, at_most=2**63 - 1
    )
    no_ceilings: bool = opt(
        False,
        "--no-ceilings",
        "Do not measure the machine's ceilings, which takes a second; omits the share of the "
        "roofline.",
    )
    revision: str | None = opt(None, *REVISION)
    quantize: Quantize = opt("auto", *QUANTIZE)
    offline: bool = opt(False, *OFFLINE)

    @property
    def weights_seed(self) -> int | None:
        """The seed of random weights, None where the model's own are loaded."""
        return self.seed if self.random_weights else None


@dataclass(frozen=True, kw_only=True)
class BenchOutput(OutputOptions):
    """As everywhere, without `-q`: short options are llama-bench's."""

    quiet: bool = opt(False, "--quiet", "No progress, notes or warnings.", panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a benchmark measures: every test of every configuration, in that order.

    `default` is the configuration without any option. `like_for_like`: of two configurations that
    differ in their `activations` alone, skip the second if the model has no products for which
    activations are rounded.
    """

    configurations: tuple[Settings, ...]
    tests: tuple[SpeedTest, ...]
    default: Settings
    runs: RunOptions
    ours: OurOptions
    like_for_like: bool = False

    @classmethod
    def of(
        cls,
        models: Sequence[str],
        threads: int,
        tests: TestOptions,
        swept: SweptOptions,
        runs: RunOptions,
        ours: OurOptions,
    ) -> Plan:
        """Raises UsageError. `threads`: used where `--threads` is not given."""
        default = Settings(model=models[0], n_threads=threads)
        axes = {name: (value,) for name, value in vars(default).items()} | {"model": tuple(models)}
        for name, setting in SETTINGS.items():
            given = getattr(swept, setting.name)
            if given is not None:
                axes[name] = setting.read(setting.option, given)
        both = ours.against == "llama.cpp" and swept.activations is None
        if both:
            axes["activations"] = ("auto", "8")
        planned = tests.tests(math.prod(map(len, axes.values())))
        grid = (dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values()))
        return cls(
            configurations=tuple(Settings(**each) for each in grid),
            tests=planned,
            default=default,
            runs=runs,
            ours=ours,
            like_for_like=both,
        )

    @property
    def longest(self) -> SpeedTest:
        """The test that needs the most room."""
        return max(self.tests, key=lambda test: test.capacity)
