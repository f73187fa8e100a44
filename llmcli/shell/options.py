"""The options that commands share, as dataclasses: declared once, documented once.

A command names the dataclasses it wants; `params.flatten` spreads them out. The panel
(`rich_help_panel`) is the heading under which our help lists the option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.records.ranges import Range
from llmcli.shell.params import arg, opt

if TYPE_CHECKING:
    from llmcli.prepare.prepared import PrecisionOptions

MODEL, PROMPT, OUTPUT = "Model", "Prompt", "Output"
TOKEN_LIMIT = Range(1, or_else=-1)  # -1: until the model ends or the context is full
# how options are spelled and what they say, which commands without `ModelOptions` have as well
QUANTIZE = ("--quantize FORMAT", "Weight format: auto (the file's), none, int8 or int4.")
REVISION = ("--revision REV", "Branch, tag or commit on the hub.")
OFFLINE = ("--offline", "Use only files on this machine; no network.")
Quantize = Literal["auto", "none", "int8", "int4"]
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, where it runs and in which arithmetic."""

    panel: ClassVar[str] = MODEL
    model: str | None = opt(
        None,
        "-m --model MODEL",
        "A catalog name (smollm2, tiny), a path to a directory, .gguf or .safetensors, or "
        "org/name[@rev] on the hub. [default: $LLMCLI_MODEL, else smollm2]",
    )
    device: str = opt(
        "auto",
        "--device DEVICE",
        "auto, cpu, cuda, cuda:1 … or mps; with cuda,cpu layers that do not fit the first are on "
        "the second.",
    )
    dtype: Dtype = opt(
        "auto", "--dtype DTYPE", "Arithmetic: auto, float64, float32, bfloat16 or float16."
    )
    quantize: Quantize = opt("auto", *QUANTIZE)
    activations: Literal["auto", "16", "8"] = opt(
        "auto",
        "--activations BITS",
        "Bits of activations in products with packed weights: 16, or 8 as in llama.cpp.",
    )
    cache_type: Dtype = opt(
        "auto",
        "--cache-type DTYPE",
        "Dtype of the KV cache. [default: float16 with packed weights on a CPU, else --dtype]",
    )
    threads: int | None = opt(
        None,
        "--threads N",
        "CPU threads. [default: OMP_NUM_THREADS, else one per core]",
        at_least=1,
        at_most=4096,
    )
    context_length: int | None = opt(
        None,
        "-c --context-length N",
        "Maximum number of tokens (8k: 8192), prompt and text together. [default: the model's own]",
        within=Range(1, k=True),
    )
    seed: int | None = opt(
        None,
        "--seed N",
        "Random seed. [default: drawn and reported]",
        at_least=0,
    )
    random_weights: bool = opt(
        False,
        "--random-weights",
        "Build the model from its configuration alone, with random weights drawn from --seed "
        "(default 0).",
    )
    edit: list[str] | None = opt(
        None,
        "--edit NAME[INDEX]=WHAT",
        "Change an activation in every pass, such as blocks.5.attn.z[H=3]=zero; repeatable. See "
        "`llmcli help interventions`.",
    )
    revision: str | None = opt(None, *REVISION)
    offline: bool = opt(False, *OFFLINE)

    @property
    def precision_options(self) -> PrecisionOptions:
        """The options that choose the precision."""
        return {
            "dtype": self.dtype,
            "quantize": self.quantize,
            "activations": self.activations,
            "cache": self.cache_type,
        }

    def check(self) -> None:
        """Raises UsageError for what can be refused before anything is loaded."""
        native.check()

    def require_exact(self) -> None:
        """Raises UsageError for an arithmetic whose rounding hides a wrong number."""
        if self.dtype in ("bfloat16", "float16"):
            raise UsageError(
                f"`--dtype {self.dtype}` rounds too coarsely to prove that numbers are equal",
                hint="use float32 or float64",
            )

    @property
    def weights_seed(self) -> int | None:
        """The seed of random weights, None where the checkpoint's own are used."""
        return (self.seed or 0) if self.random_weights else None

    def sampling_seed(self) -> tuple[int, bool]:
        """The seed of the text, and whether it was drawn for this run.

        Random weights without a seed take 0 for both: a drawn one could not be given again
        without changing the weights too.
        """
        if self.seed is not None or self.random_weights:
            return self.seed or 0, False
        import secrets  # which imports OpenSSL

        return secrets.randbelow(2**31), True


@dataclass(frozen=True, kw_only=True)
class GivenPromptOptions:
    """Where the text comes from: PROMPT, a file, or token ids; stdin is read for `-` only."""

    panel: ClassVar[str] = PROMPT
    prompt: str | None = arg(None, "[PROMPT]", "The text; `-` reads stdin.")
    file: str | None = opt(
        None,
        "-f --file PATH",
        "Read the text from a file (`-`: stdin). A .json file with `messages` is a conversation.",
        once=True,
    )
    ids: str | None = opt(
        None,
        "--ids 1,2,3",
        "Token ids instead of text, separated by commas or spaces.",
        excludes=("PROMPT", "--file"),
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions(GivenPromptOptions):
    """Prompt options of commands that read a piped stdin by default."""

    panel: ClassVar[str] = PROMPT
    prompt: str | None = arg(
        None, "[PROMPT]", "The text; piped input is put before it, and `-` always reads stdin."
    )
    no_stdin: bool = opt(
        False, "--no-stdin", "Never read a pipe on stdin.", excludes=("PROMPT=-", "--file=-")
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Output format and destination; `main` reads them for error reporting, too."""

    panel: ClassVar[str] = OUTPUT
    json: bool = opt(False, "--json", "One JSON document on stdout.")
    quiet: bool = opt(False, "-q --quiet", "No progress, notes or warnings.")
    debug: bool = opt(False, "--debug", "Tracebacks with error messages.")


@dataclass(frozen=True, kw_only=True)
class PagedOutputOptions(OutputOptions):
    """Output options of commands whose result may be taller than the terminal."""

    no_pager: bool = opt(False, "--no-pager", "Show a long result without a pager.")


@dataclass(frozen=True, kw_only=True)
class ViewOutputOptions(PagedOutputOptions):
    """Output options of commands whose result is a view with checks."""

    checks: bool = opt(False, "--checks", "Show every check with its value and its tolerance.")


@dataclass(frozen=True, kw_only=True)
class SpecialOptions:
    """How special tokens in the text are parsed."""

    panel: ClassVar[str] = PROMPT
    no_special: bool = opt(
        False, "--no-special", "Special tokens written in the text are plain text."
    )
