"""`llmcli env`: this machine, and where each setting comes from."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from llmcli import OPENMP_SPIN, OPENMP_SPIN_BUSY, OPENMP_VARIABLES, WITHIN_QUOTA
from llmcli.commands.env.report import (
    ConfigurationProblem,
    ConfigurationReport,
    ConfiguredOption,
    EnvironmentReport,
    Setting,
)
from llmcli.errors import UsageError
from llmcli.kernels.native import VARIABLE as KERNELS
from llmcli.limits import processors
from llmcli.measure.environment import environment
from llmcli.shell.configuration.file import place, read
from llmcli.shell.configuration.values import VARIABLES, examined, names_from_file, root_of
from llmcli.shell.options import ModelOptions, PagedOutputOptions
from llmcli.shell.output import Output

TOLERANT = True  # of a configuration file that is wrong: it is reported


def command(model: ModelOptions, output: PagedOutputOptions, ctx: typer.Context) -> None:
    """This machine and its software, and where each setting comes from.

    The header is the one that goes into every measured result. Options given here are shown as
    they would be used by other commands, and so is what the configuration file sets. PyTorch is
    not imported.
    """
    from llmcli.commands.env.view import render_environment

    out = Output("env", output)
    model.check()
    configuration = _configuration(root_of(ctx))
    found = settings(model, os.environ, names_from_file(ctx), configuration)
    threads = next(str(setting.value) for setting in found if setting.name == "threads")
    machine = environment()
    if threads.isdecimal():
        machine = replace(machine, threads=int(threads))
    report = EnvironmentReport(environment=machine, settings=found, configuration=configuration)
    out.present(
        lambda: render_environment(report),
        {
            "settings": [
                {name: value for name, value in vars(setting).items() if name != "words"}
                for setting in found
            ],
            "configuration": configuration,
        },
        model=None,
        environment=machine,
    )


def _configuration(root: Any) -> ConfigurationReport:
    """The configuration file, all of it checked for the commands of `root`."""
    path = place()[0]
    try:
        file = read(root.configured)
        keys, wrong = examined(file, root)
    except UsageError as error:
        keys, wrong = [], [error]
    return ConfigurationReport(
        path=None if path is None else str(path.absolute()),
        exists=path is not None and _exists(path),
        options=tuple(
            ConfiguredOption(command=key.command or None, option=key.name, value=key.value)
            for key in keys
        ),
        problems=tuple(
            ConfigurationProblem(message=error.message, hint=error.hint) for error in wrong
        ),
    )


def _exists(path: Path) -> bool:
    """Whether there is such a file; true where that may not be seen, of which reading it tells."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def settings(
    model: ModelOptions,
    environ: Mapping[str, str],
    from_file: Collection[str],
    configuration: ConfigurationReport,
) -> tuple[Setting, ...]:
    """Every setting with its value and its source; secrets are only said to be set."""
    from llmcli.checkpoints import cache_dir
    from llmcli.checkpoints.catalog import offline_from_environment
    from llmcli.checkpoints.locate import DEFAULT_MODEL

    def pick(
        name: str,
        flag: tuple[str, object],
        variables: tuple[str, ...],
        default: str | None,
        words: str = "",
    ) -> Setting:
        option, value = flag
        if value is not None and value is not False:  # a seed of 0 is a seed
            text = "on" if value is True else str(value)
            key = option.removeprefix("--")
            if key.replace("-", "_") in from_file:
                return Setting(name=name, value=text, words=text, source="file", origin=key)
            return Setting(name=name, value=text, words=text, source="flag", origin=option)
        for variable in variables:
            if text := environ.get(variable, ""):
                return Setting(
                    name=name, value=text, words=text, source="environment", origin=variable
                )
        return Setting(
            name=name, value=default, words=words or default or "", source="default", origin=""
        )

    def place(name: str, path: Path, variables: tuple[str, ...]) -> Setting:
        picked = pick(name, none, variables, str(path))
        whole = path.expanduser().absolute()
        return replace(picked, value=str(whole), words=_short(whole))

    none = ("", None)
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(environ.get("HF_HOME") or caches / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    offline = pick(
        "offline", ("--offline", model.offline), VARIABLES["offline"], "off"
    )
    used = model.offline or offline_from_environment()
    offline = replace(offline, value=used, words="on" if used else "off")
    token = pick("hub token", none, ("HF_TOKEN",), None, "not set")
    if token.value is not None:
        token = replace(token, value=True, words="set, not shown")
    chosen = [
        _file(configuration),
        pick("model", ("--model", model.model), VARIABLES["model"], DEFAULT_MODEL),
        place("llmcli cache", cache_dir(), ("LLMCLI_CACHE", "XDG_CACHE_HOME")),
        place("hub cache", hub, ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")),
        place("hub home", home, ("HF_HOME", "XDG_CACHE_HOME")),
        token,
        offline,
        pick("revision", ("--revision", model.revision), (), None, "the hub's default branch"),
        pick("device", ("--device", _unless(model.device, "auto")), (), "auto"),
        pick("visible GPUs", none, ("CUDA_VISIBLE_DEVICES",), None, "all"),
        pick("dtype", ("--dtype", _unless(model.dtype, "auto")), (), "auto"),
        pick("quantize", ("--quantize", _unless(model.quantize, "auto")), (), "auto"),
        pick("activations", ("--activations", _unless(model.activations, "auto")), (), "auto"),
        pick("cache type", ("--cache-type", _unless(model.cache_type, "auto")), (), "auto"),
        pick(
            "threads",
            ("--threads", model.threads),
            VARIABLES["threads"],
            str(processors()) if WITHIN_QUOTA else None,
            f"{processors()}, the container's quota" if WITHIN_QUOTA
            else f"PyTorch's choice for {processors()} cores",
        ),
        pick("kernels", none, (KERNELS,), None, "the processor's best"),
        _openmp_spin(environ),
        pick("context length", ("--context-length", model.context_length), (), None, "the model's"),
        pick("seed", ("--seed", model.seed), (), None, "drawn for each run"),
        pick("weights", ("--random-weights", model.random_weights), (), None, "the checkpoint's"),
        _colour(environ),
    ]
    return tuple(chosen)


def _file(configuration: ConfigurationReport) -> Setting:
    """Where the configuration file is."""
    words = "none is read" if configuration.path is None else _short(Path(configuration.path))
    if configuration.path is not None and not configuration.exists:
        words += " (no such file)"
    variable = place()[1]
    return Setting(
        name="configuration", value=configuration.path, words=words,
        source="environment" if variable else "default", origin=variable,
    )  # fmt: skip


def _openmp_spin(environ: Mapping[str, str]) -> Setting:
    """How long OpenMP's threads wait busily: the user's variable, else what the package set."""
    for variable in OPENMP_VARIABLES:
        text = environ.get(variable)
        ours = (OPENMP_SPIN.get(variable), OPENMP_SPIN_BUSY.get(variable))
        if text and text not in ours:
            return Setting(
                name="OpenMP spin", value=text, words=text, source="environment", origin=variable
            )
    rounds = environ.get("GOMP_SPINCOUNT", OPENMP_SPIN["GOMP_SPINCOUNT"])
    words = f"{rounds}, others run" if rounds == OPENMP_SPIN_BUSY["GOMP_SPINCOUNT"] else rounds
    return Setting(name="OpenMP spin", value=rounds, words=words, source="default", origin="")


def _short(path: Path) -> str:
    """`path` from the home directory where it lies in there."""
    home = Path.home()
    return str("~" / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _unless(value: str, default: str) -> str | None:
    return None if value == default else value


def _colour(environ: Mapping[str, str]) -> Setting:
    """What decides about colour, in the order of precedence."""
    value, variable = None, ""
    if environ.get("NO_COLOR"):
        value, variable = "off", "NO_COLOR"
    elif environ.get("TERM") == "dumb":
        value, variable = "off", "TERM"
    elif environ.get("FORCE_COLOR", "0") not in ("", "0"):
        value, variable = "on", "FORCE_COLOR"
    if variable:
        return Setting(
            name="colour",
            value=value == "on",
            words=str(value),
            source="environment",
            origin=variable,
        )
    return Setting(name="colour", value=None, words="on terminals", source="default", origin="")
