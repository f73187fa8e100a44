"""What measuring returns: plain dataclasses of numbers and strings, ready for JSON.

`measure` fills them, `render` shows them, `--json` prints them. No torch, no rich.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["stop", "length", "eos", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the software that a result was measured with.

    Sizes in bytes. `cores` are the logical processors that this process may use. Fields that
    only PyTorch can answer are None where it was not imported (`threads`, `cuda`, `kernels`).
    """

    llmcli: str
    python: str
    platform: str
    processor: str
    cores: int
    features: tuple[str, ...]
    memory_bytes: int | None
    gpus: tuple[str, ...]
    driver: str | None
    torch: str | None
    cuda: str | None = None
    threads: int | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: its value, and whether a flag, an environment variable or nobody set it.

    `value` is None where nothing is set and something else decides, which `words` name; a path
    is absolute there, and in words begins with `~` where it can. A secret is only True.
    """

    name: str
    value: str | bool | None
    words: str
    source: Literal["flag", "environment", "default"]
    origin: str


@dataclass(frozen=True, kw_only=True)
class EnvironmentReport:
    """What `llmcli env` prints."""

    environment: Environment
    settings: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class TokenPiece:
    """One token of a text: bytes `start` to `end` of its UTF-8 form; BOS has none.

    `text` is for people: bytes that are no whole character are spelled out. `bytes` are those
    that the token stands for, in hexadecimal.
    """

    id: int
    text: str
    bytes: str
    start: int
    end: int
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokensReport:
    """A text in tokens, as the model would be given it. `rendered`: the chat template's text."""

    text: str | None
    rendered: str | None
    tokens: tuple[TokenPiece, ...]
    bytes: int
    vocabulary: int
    bos: int | None
    adds_bos: bool
    eos: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token, its log-probability (natural) given all before it, and its rank (1: likeliest)."""

    id: int
    text: str
    logprob: float | None
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts a text. Logarithms are natural, bits are base 2.

    `mean_logprob`, `perplexity` = exp(-mean) and `bits_per_byte` are NaN where nothing could
    be scored. `window` and `stride`: the most tokens seen at once, and by how many it moves.
    """

    tokens: tuple[ScoredToken, ...]
    tokens_scored: int
    bytes_scored: int
    mean_logprob: float
    perplexity: float
    bits_per_byte: float
    window: int
    stride: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on one text: theirs minus ours; per token only where the tokens are the same."""

    bits_per_byte: float
    mean_logprob: float | None
    largest_difference: float | None
    same_tokens: bool


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A token that the model could have chosen, with its log-probability."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A generated token's log-probability under the raw model, and the likeliest ones."""

    id: int
    text: str
    logprob: float | None
    top: tuple[Alternative, ...]


@dataclass(kw_only=True)
class Generated:
    """One continuation. `finish_reason` stays `interrupted` until the last token arrives."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: Finish = "interrupted"
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds, tokens per second and bytes of one run of `generate`.

    `first_token_s` counts from the first prompt token to the first new one; the prompt's rate
    is measured over the same time. The rate of generation leaves the first token out.
    """

    import_s: float
    load_s: float
    first_token_s: float | None
    prompt_tokens: int
    prompt_tokens_per_s: float | None
    generated_tokens: int
    generated_tokens_per_s: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Matrix products: calls with a single row or column, calls with more, FLOPs, bytes.

    No whole numbers where they are a sequence's share of a batch, or estimated.
    """

    gemv: float
    gemm: float
    flops: float
    bytes: float

    def scaled(self, factor: float) -> Work:
        """All of it, `factor` times."""
        return Work(
            gemv=self.gemv * factor,
            gemm=self.gemm * factor,
            flops=self.flops * factor,
            bytes=self.bytes * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds of repeated runs."""

    median: float
    lowest: float
    highest: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One step that a rung shows. `strides` in numbers, empty where it is no tensor but a list.

    Where only the shape changed, `source` has shape and strides before it, and `moved` says
    whether numbers were copied for it. `values`: the last two axes, whole or their upper left
    corner.
    """

    formula: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: tuple[tuple[int, ...], tuple[int, ...]] | None
    moved: bool | None
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RungReport:
    """One rung: what it changes, what it computes, how long that takes.

    Seconds and work are those of one sequence: of a batch, its share. `prompt` is the whole
    prompt, `token` one more token. `estimated`: the part that was measured, where the times are
    scaled up from it. `difference`: the largest from the rung below, in what is `compared`.
    """

    number: int
    name: str
    title: str
    change: tuple[str, str]
    idea: str
    sequences: int
    prompt_s: Spread
    token_s: Spread
    prompt_work: Work
    token_work: Work
    steps: tuple[Shown, ...]
    estimated: str | None = None
    prompt_speedup: float | None = None
    token_speedup: float | None = None
    compared: str | None = None
    difference: float | None = None
    allowed: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the difference is within rounding; NaN is not."""
        if self.difference is None or self.allowed is None:
            return True
        return self.difference <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to compute the decoder's step that the machine offers, or why it does not.

    `speedup` is the median ratio of neighbouring runs of the decoder's own step and this one;
    `divergence` KL(decoder ‖ variant) of the next token's distribution, in nats.
    """

    name: str
    what: str
    token_s: Spread | None = None
    speedup: float | None = None
    difference: float | None = None
    divergence: float | None = None
    same_token: bool | None = None
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class LadderReport:
    """The climb. `letters`: what n, d, h … are here; `more`: the tokens read one by one.

    `beyond`: what the machine offers beyond rung 8, where that was asked for.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    more: tuple[str, ...]
    letters: tuple[tuple[str, int], ...]
    dtype: str
    rungs: tuple[RungReport, ...]
    beyond: tuple[Variant, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rung agrees with the one below."""
        return all(rung.ok for rung in self.rungs)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of arithmetic: `formula` has a `{}` for each of `parts`, and gives `value`."""

    formula: str
    parts: tuple[float, ...]
    value: float


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of a sum: `at` is what the sum runs over, `label` the token or part that it is.

    `value` is the product of `parts`, or what the sum's formula makes of them.
    """

    at: int
    parts: tuple[float, ...]
    value: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """What the terms of a step are: `Σᵢ T¹[7,i] · W_q[i,132]`, over `over`, and their sum.

    `columns` name the parts of a term and, where it is more than their product, its value.
    """

    formula: str
    over: str
    columns: tuple[str, ...]
    value: float


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One entry of an index: the axis in words, the place on it, the token that it means if any."""

    axis: str
    at: int
    token: str | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One number of a derivation and how it follows from its inputs.

    `symbol` is the number in the documents' letters (`Q[2,7,4]`), `shape` its tensor's in letters
    and numbers, `where` what the index means. `source`: `derived` by `before`, the
    `terms` of `sum`, and `after`; taken from the `kernel`; or from the `weights`, where it is a
    parameter. `origins`: what was added up to it, block by block. `kernel` is what the fast
    kernel has there. `children` are the numbers of the steps that it follows from.
    """

    number: int
    name: str
    index: tuple[int, ...]
    symbol: str
    formula: str
    shape: str
    where: tuple[Coordinate, ...]
    source: Literal["derived", "kernel", "weights"]
    value: float
    kernel: float
    difference: float
    tolerance: float
    ok: bool
    note: str = ""
    before: tuple[Fact, ...] = ()
    sum: Sum | None = None
    terms: tuple[Term, ...] = ()
    after: tuple[Fact, ...] = ()
    origins: tuple[Term, ...] = ()
    children: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Check:
    """Two ways to the same number: what was compared, both values, and whether they agree."""

    words: str
    derived: float
    kernel: float
    difference: float
    tolerance: float
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A letter of the documents, what it means, and how many that are here."""

    letter: str
    words: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One number of a model, derived; `tokens` as (id, text), `depth` None: down to the weights.

    `tensors` were derived as a whole, in float64, for the one number. `steps` are numbered from 1,
    the number itself first, and `ok` where each of them and every check agree with the kernel.
    """

    name: str
    index: tuple[int, ...]
    tokens: tuple[tuple[int, str], ...]
    letters: tuple[Letter, ...]
    depth: int | None
    dtype: str
    value: float
    kernel: float
    difference: float
    tolerance: float
    ok: bool
    tensors: int
    checks: tuple[Check, ...]
    steps: tuple[Step, ...]
