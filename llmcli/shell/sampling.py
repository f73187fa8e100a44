"""The sampling options of `generate`, and which of the values for each is in force."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from llmcli.records.ranges import SAMPLING, Range
from llmcli.shell.params import opt

if TYPE_CHECKING:
    from llmcli.engine.sampling import Sampling
    from llmcli.model import Model

Origin = Literal[
    "flag", "configuration file", "generation_config.json", "general.sampling", "catalog", "default"
]
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
# What else transformers' GenerationConfig has that changes the text of a decoder, with the values
# that change nothing; None, false and nothing at all never do.
NOT_FOLLOWED: Mapping[str, tuple[float, ...]] = {
    "max_length": (), "max_time": (), "num_return_sequences": (1,),
    "min_length": (0,), "min_new_tokens": (0,), "num_beams": (0, 1),
    "num_beam_groups": (0, 1), "diversity_penalty": (0,), "constraints": (),
    "force_words_ids": (), "penalty_alpha": (0,), "dola_layers": (),
    "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (),
    "sequence_bias": (), "exponential_decay_length_penalty": (), "guidance_scale": (1,),
    "token_healing": (), "watermarking_config": (),
    # these are followed where their type is right
    "suppress_tokens": (), "begin_suppress_tokens": (), "stop_strings": (), "max_new_tokens": (),
}  # fmt: skip
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
# Likewise filters, which the likeliest token passes: greedy text is not changed.
NOT_FOLLOWED_FILTERS: Mapping[str, tuple[float, ...]] = {
    "top_h": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
# llama.cpp's names, behind `general.sampling.`, for what a GGUF file has of `SAMPLING` …
_GGUF: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# … and what else it may have, with the values that change nothing.
_GGUF_NOT_FOLLOWED: Mapping[str, tuple[float, ...]] = {
    "sequence": (),
    "xtc_probability": (0,),
    "penalty_last_n": (-1,),
    "mirostat": (0,),
}


def _default(name: str) -> str:
    return f"[default: the model's, else {DEFAULTS[name]}]"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen; None where the option was not given."""

    panel: ClassVar[str] = PANEL
    temperature: float | None = opt(
        None,
        "-t --temperature X",
        f"Randomness; 0 is greedy. {_default('temperature')}",
        within=SAMPLING["temperature"],
        aliases=("--temp",),
    )
    top_k: int | None = opt(
        None,
        "-k --top-k N",
        f"Only the N likeliest tokens; 0 is off. {_default('top_k')}",
        within=SAMPLING["top_k"],
    )
    top_p: float | None = opt(
        None,
        "-p --top-p X",
        f"Only the likeliest tokens that make up X together; 1 is off. {_default('top_p')}",
        within=SAMPLING["top_p"],
    )
    min_p: float | None = opt(
        None,
        "--min-p X",
        f"Only tokens at least X times as likely as the likeliest; 0 is off. {_default('min_p')}",
        within=SAMPLING["min_p"],
    )
    repetition_penalty: float | None = opt(
        None,
        "--repetition-penalty X",
        "Divides the logits of tokens in prompt and output; 1 is off.",
        within=SAMPLING["repetition_penalty"],
    )
    presence_penalty: float | None = opt(
        None,
        "--presence-penalty X",
        "Subtracted from the logits of tokens in the output; 0 is off.",
        within=SAMPLING["presence_penalty"],
    )
    frequency_penalty: float | None = opt(
        None,
        "--frequency-penalty X",
        "Subtracted once for each time the token is in the output; 0 is off.",
        within=SAMPLING["frequency_penalty"],
    )
    greedy: bool = opt(
        False, "--greedy", "Always the likeliest token.", excludes=("--temperature!=0.0",)
    )


# other names of these, as the command line takes them
ALIASES: Mapping[str, str] = {
    alias.removeprefix("--"): one.name
    for one in fields(SamplingOptions)
    for alias in one.metadata["declared"].aliases
}


@dataclass(frozen=True, kw_only=True)
class SamplingValues:
    """A value for each sampling option, and the seed."""

    temperature: Annotated[float, SAMPLING["temperature"]]
    top_k: Annotated[int, SAMPLING["top_k"]]
    top_p: Annotated[float, SAMPLING["top_p"]]
    min_p: Annotated[float, SAMPLING["min_p"]]
    repetition_penalty: Annotated[float, SAMPLING["repetition_penalty"]]
    presence_penalty: Annotated[float, SAMPLING["presence_penalty"]]
    frequency_penalty: Annotated[float, SAMPLING["frequency_penalty"]]
    seed: Annotated[int, Range(0)]

    def engine(self, suppressed: Mapping[str, tuple[int, ...]]) -> Sampling:
        """What the engine takes; `suppressed` are tokens by the names of its fields."""
        from llmcli.engine.sampling import Sampling

        values: dict[str, Any] = {n.name: getattr(self, n.name) for n in fields(SamplingValues)}
        return Sampling(**values | dict(suppressed))


@dataclass(frozen=True)
class Resolved:
    """The values in force, where each comes from, and what the user should know about them.

    `ignored`: what the model's files set and llmcli does not follow; `suppressed`: the tokens that
    they forbid, by the names of `Sampling`. `limit` (new tokens) and `stop` are theirs too, for
    who has none of the user's.
    """

    values: SamplingValues
    origins: Mapping[str, Origin]
    notes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    suppressed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    limit: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether sampling is deterministic."""
        return self.values.temperature == 0


def resolve(
    model: Model, options: SamplingOptions, seed: int, from_file: Collection[str], *, limited: bool
) -> Resolved:
    """Flags win over the model's files, then what the catalog has for its name, then defaults.

    The files are `generation_config.json`, or the metadata of a GGUF file.
    `from_file`: the options that the configuration file has set, whose origin that is.
    Value by value: a `generation_config.json` without a temperature leaves that to the catalog.
    `do_sample: false` in the configuration is a temperature of 0. A value there that is not a
    number of its range is passed over with a note, and so is all that changes the text in
    transformers or llama.cpp and not here. `limited`: the user says how many tokens are written.
    """
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.checkpoints.files import shown

    configuration, metadata = model.checkpoint.generation_config, model.checkpoint.metadata
    tuned = CATALOG[model.name].sampling if model.name in CATALOG else {}
    given, place, program = configuration or {}, "generation_config.json", ""
    own: Origin = "generation_config.json"
    if configuration is None and metadata:
        given, own = _from_gguf(metadata), "general.sampling"
        place, program = "the GGUF file's `general.sampling`", "llama.cpp"
    values: dict[str, Any] = {}
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
            values[name], origins[name] = theirs, own
        elif theirs is not None:
            found, needed = shown(repr(theirs), 40), SAMPLING[name]
            notes.append(f"{place} has `{name}` {found}, which must be {needed}: {usual:g} is used")
    greedy = values["temperature"] == 0
    idle = [name for name in ("top_k", "top_p", "min_p") if origins[name] == "flag"]
    if greedy and idle:
        flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in idle)
        why = f"the temperature is 0 ({origins['temperature']})"
        notes.append(f"{flags} changes nothing: {why}, so the likeliest token is always taken")
    limit, stop = given.get("max_new_tokens"), given.get("stop_strings")
    stop = [stop] if isinstance(stop, str) else stop
    followed = {name: ids for name in SUPPRESSED if (ids := _ids(given.get(name)))}
    if type(limit) is int and limit > 0:
        followed["max_new_tokens"] = ()
    if isinstance(stop, list) and stop and all(isinstance(one, str) and one for one in stop):
        followed["stop_strings"] = ()
    neutral = {**NOT_FOLLOWED, **({} if greedy else NOT_FOLLOWED_FILTERS)}
    moot = ("max_length",) if limited or "max_new_tokens" in followed else ()
    ignored = _not_followed(given, neutral, (*followed, *moot))
    if program:
        moot = ("penalty_last_n",) if values["repetition_penalty"] == 1 else ()
        ignored += _not_followed(metadata, _GGUF_NOT_FOLLOWED, moot, "general.sampling.")
    if ignored:
        named = ", ".join(f"`{name}`" for name in ignored)
        notes.append(
            f"{place} sets {named}, which llmcli does not follow: the text may differ from that of "
            f"{program or 'transformers'}"
        )
    return Resolved(
        SamplingValues(**values | {"top_k": int(values["top_k"])}, seed=seed),
        origins,
        tuple(notes),
        ignored,
        suppressed={name: ids for name, ids in followed.items() if ids},
        limit=limit if "max_new_tokens" in followed else None,
        stop=tuple(stop or ()) if "stop_strings" in followed else (),
    )


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids, empty where it is no list of them."""
    whole = isinstance(value, list) and all(type(one) is int for one in value)
    return tuple(value) if whole else ()


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`general.sampling` by the names of `SAMPLING`, as llama.cpp reads it (common/common.cpp).

    That has six digits of a number, and takes those beyond a filter's range as off.
    """
    found: dict[str, Any] = {}
    for key, name in _GGUF.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = round(value, 6)
            if name in ("temperature", "top_k", "min_p"):
                value = max(value, 0)
            value = min(value, 1.0) if name == "top_p" else value
        found[name] = value
    if metadata.get("general.sampling.penalty_last_n") == 0:
        found["repetition_penalty"] = 1.0
    return found


def _not_followed(
    settings: Mapping[str, Any],
    neutral: Mapping[str, tuple[float, ...]],
    followed: Collection[str],
    prefix: str = "",
) -> tuple[str, ...]:
    """The names whose value in `settings` is none of the `neutral` ones, which change nothing."""
    values = {name: settings.get(f"{prefix}{name}") for name in neutral if name not in followed}
    return tuple(
        name
        for name, value in values.items()
        if value is not False and value not in (None, [], {}, "", *neutral[name])
    )


def valid(name: str, value: Any) -> bool:
    """Whether the value is a number, or an integer where the sampling option requires one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value in SAMPLING[name] and (name != "top_k" or value == int(value))
