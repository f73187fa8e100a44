"""The sampling options of `generate`, and which of the values for each is in force."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmcli.cli.params import Range, opt
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.engine.sampling import Sampling

Origin = Literal[
    "flag", "configuration file", "generation_config.json", "catalog", "default"
]  # fmt: skip
PANEL = "Sampling"

DEFAULTS: Mapping[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
RANGES: Mapping[str, Range] = {
    "temperature": Range(0),
    "top_k": Range(0),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, above=True),
    "presence_penalty": Range(-1e6, 1e6),
    "frequency_penalty": Range(-1e6, 1e6),
}
# What else transformers' GenerationConfig has that changes the text of a decoder, with the values
# that change nothing; None, false and nothing at all never do.
NOT_FOLLOWED: Mapping[str, tuple[float, ...]] = {
    "min_length": (0,), "min_new_tokens": (0,), "stop_strings": (), "num_beams": (0, 1),
    "num_beam_groups": (0, 1), "diversity_penalty": (0,), "constraints": (),
    "force_words_ids": (), "penalty_alpha": (0,), "dola_layers": (),
    "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": (), "suppress_tokens": (),
    "begin_suppress_tokens": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "sequence_bias": (), "exponential_decay_length_penalty": (), "guidance_scale": (1,),
    "token_healing": (), "watermarking_config": (),
}  # fmt: skip
# The same, but the likeliest token passes these filters, so that greedy text is not changed.
NOT_FOLLOWED_FILTERS: Mapping[str, tuple[float, ...]] = {
    "top_h": (1,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen; None where the user did not say."""

    panel: ClassVar[str] = PANEL
    temperature: float | None = opt(
        None, "-t", "--temperature", "X",
        "Randomness; 0 is greedy. [default: the model's, else 0.8]", within=RANGES["temperature"],
        aliases=("--temp",),
    )  # fmt: skip
    top_k: int | None = opt(
        None, "-k", "--top-k", "N",
        "Only the N likeliest tokens; 0 is off. [default: the model's, else 40]",
        within=RANGES["top_k"],
    )  # fmt: skip
    top_p: float | None = opt(
        None, "-p", "--top-p", "X",
        "Only the likeliest tokens that make up X together; 1 is off. [default: the model's, else "
        "0.95]", within=RANGES["top_p"],
    )  # fmt: skip
    min_p: float | None = opt(
        None, "--min-p", "X",
        "Only tokens at least X times as likely as the likeliest; 0 is off. [default: the "
        "model's, else 0.05]", within=RANGES["min_p"],
    )  # fmt: skip
    repetition_penalty: float | None = opt(
        None, "--repetition-penalty", "X",
        "Divides the logits of tokens in prompt and output; 1 is off.",
        within=RANGES["repetition_penalty"],
    )  # fmt: skip
    presence_penalty: float | None = opt(
        None, "--presence-penalty", "X",
        "Subtracted from the logits of tokens in the output; 0 is off.",
        within=RANGES["presence_penalty"],
    )  # fmt: skip
    frequency_penalty: float | None = opt(
        None, "--frequency-penalty", "X",
        "The same, times how often the token is in the output; 0 is off.",
        within=RANGES["frequency_penalty"],
    )  # fmt: skip
    greedy: bool = opt(False, "--greedy", "Always the likeliest token.")

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        if self.greedy and self.temperature:
            raise UsageError("`--greedy` and `--temperature` above 0 exclude each other")


@dataclass(frozen=True)
class Resolved:
    """The values in force, where each comes from, and what the user should know about them.

    `ignored`: what generation_config.json sets and llmcli does not follow.
    """

    values: Mapping[str, float]
    origins: Mapping[str, Origin]
    notes: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.values["temperature"] == 0

    def sampling(self, seed: int) -> Sampling:
        """What the engine takes."""
        return engine_sampling(self.values, seed)


def engine_sampling(values: Mapping[str, float], seed: int) -> Sampling:
    """What the engine takes; `values` are by the names of `RANGES`."""
    from llmcli.engine.sampling import Sampling

    others = {name: value for name, value in values.items() if name != "top_k"}
    return Sampling(top_k=int(values["top_k"]), seed=seed, **others)


def resolve(
    options: SamplingOptions,
    configuration: Mapping[str, Any] | None,
    tuned: Mapping[str, float] | None = None,
    from_file: Collection[str] = (),
) -> Resolved:
    """Flags win over `generation_config.json`, then what the catalog has, `tuned`, then defaults.

    `from_file`: the options that the configuration file has set, whose origin that is.
    Value by value: a `generation_config.json` without a temperature leaves that to the catalog.
    `do_sample: false` in the configuration is a temperature of 0. A value there that is not a
    number of its range is passed over with a note, and so is all that changes the text in
    transformers and not here.
    """
    given, tuned = configuration or {}, tuned or {}
    values: dict[str, float] = {}
    origins: dict[str, Origin] = {}
    notes = []
    for name, default in DEFAULTS.items():
        flag: float | None = getattr(options, name)
        theirs: Any = given.get(name)
        if name == "temperature" and given.get("do_sample") is False:
            theirs = 0.0
        if name == "temperature" and options.greedy:
            flag = 0.0
        usual = tuned.get(name, default)
        values[name], origins[name] = usual, "catalog" if name in tuned else "default"
        if flag is not None:
            option = "greedy" if name == "temperature" and options.greedy else name
            origin: Origin = "configuration file" if option in from_file else "flag"
            values[name], origins[name] = flag, origin
        elif valid(name, theirs):
            values[name], origins[name] = theirs, "generation_config.json"
        elif theirs is not None:
            notes.append(
                f"generation_config.json has `{name}` {theirs!r}, which must be {RANGES[name]}: "
                f"{usual:g} is used"
            )
    resolved = Resolved(values, origins, tuple(notes))
    idle = [name for name in ("top_k", "top_p", "min_p") if origins[name] == "flag"]
    if resolved.greedy and idle:
        flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in idle)
        why = f"the temperature is 0 ({origins['temperature']})"
        notes.append(f"{flags} changes nothing: {why}, so the likeliest token is always taken")
    ignored = _not_followed(given, greedy=resolved.greedy)
    if ignored:
        named = ", ".join(f"`{name}`" for name in ignored)
        notes.append(
            f"generation_config.json sets {named}, which llmcli does not follow: the text may "
            "differ from that of transformers"
        )
    return Resolved(values, origins, tuple(notes), ignored)


def _not_followed(configuration: Mapping[str, Any], *, greedy: bool) -> tuple[str, ...]:
    names = NOT_FOLLOWED if greedy else {**NOT_FOLLOWED, **NOT_FOLLOWED_FILTERS}
    values = {name: configuration.get(name) for name in names}
    set_ = [name for name, value in values.items() if value not in (None, [], {}, "")]
    return tuple(
        name for name in set_ if values[name] is not False and values[name] not in names[name]
    )


def valid(name: str, value: Any) -> bool:
    """Whether it is a number that this sampling option takes, a whole one where it must be."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value in RANGES[name] and (name != "top_k" or value == int(value))
