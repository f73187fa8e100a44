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
from llmcli.records.document import members
from llmcli.shell.configuration import VARIABLES, examined, names_from_file, place, read, root_of
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
        lambda: render_environment(report), members(report), model=None, environment=machine
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
    """Whether the file exists; true if that cannot be seen, which reading it will report."""
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

    usual = ModelOptions()

    def pick(
        name: str,
        default: str | None,
        words: str = "",
        *,
        field: str = "",
        variables: tuple[str, ...] = (),
    ) -> Setting:
        """The option of this `field`, else the first of `variables` that is set, else `default`."""
        value = getattr(model, field) if field else None
        if field and value != getattr(usual, field):
            text, key = "on" if value is True else str(value), field.replace("_", "-")
            if field in from_file:
                return Setting(name=name, value=text, words=text, source="file", origin=key)
            return Setting(name=name, value=text, words=text, source="flag", origin=f"--{key}")
        for variable in variables:
            if text := environ.get(variable, ""):
                return Setting(
                    name=name, value=text, words=text, source="environment", origin=variable
                )
        return Setting(name=name, value=default, words=words or default or "")

    def place(name: str, path: Path, variables: tuple[str, ...]) -> Setting:
        whole = path.expanduser().absolute()
        return replace(
            pick(name, None, variables=variables), value=str(whole), words=_short(whole)
        )

    def auto(name: str) -> Setting:
        return pick(name, "auto", field=name.replace(" ", "_"))

    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(environ.get("HF_HOME") or caches / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    offline = model.offline or offline_from_environment()
    token = pick("hub token", None, "not set", variables=("HF_TOKEN",))
    if token.value is not None:
        token = replace(token, value=True, words="set, not shown")
    threads = f"PyTorch's choice for {processors()} cores"
    if WITHIN_QUOTA:
        threads = f"{processors()}, the container's quota"
    return (
        _file(configuration),
        pick("model", DEFAULT_MODEL, field="model", variables=VARIABLES["model"]),
        place("llmcli cache", cache_dir(), ("LLMCLI_CACHE", "XDG_CACHE_HOME")),
        place("hub cache", hub, ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")),
        place("hub home", home, ("HF_HOME", "XDG_CACHE_HOME")),
        token,
        replace(
            pick("offline", None, field="offline", variables=VARIABLES["offline"]),
            value=offline, words="on" if offline else "off",
        ),
        pick("revision", None, "the hub's default branch", field="revision"),
        auto("device"),
        pick("visible GPUs", None, "all", variables=("CUDA_VISIBLE_DEVICES",)),
        *map(auto, ("dtype", "quantize", "activations", "cache type")),
        pick("threads", str(processors()) if WITHIN_QUOTA else None, threads,
             field="threads", variables=VARIABLES["threads"]),
        pick("kernels", None, "the processor's best", variables=(KERNELS,)),
        _openmp_spin(environ),
        pick("context length", None, "the model's", field="context_length"),
        pick("seed", None, "drawn for each run", field="seed"),
        pick("weights", None, "the checkpoint's", field="random_weights"),
        _colour(environ),
    )  # fmt: skip


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
    busy = rounds == OPENMP_SPIN_BUSY["GOMP_SPINCOUNT"]
    return Setting(name="OpenMP spin", value=rounds, words=f"{rounds}{', others run' * busy}")


def _short(path: Path) -> str:
    """`path` with `~` for the home directory."""
    home = Path.home()
    return str("~" / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _colour(environ: Mapping[str, str]) -> Setting:
    """Whether there is colour, and the variable that decides it."""
    decides = (
        ("NO_COLOR", bool(environ.get("NO_COLOR")), False),
        ("TERM", environ.get("TERM") == "dumb", False),
        ("FORCE_COLOR", environ.get("FORCE_COLOR", "0") not in ("", "0"), True),
    )
    for variable, given, value in decides:
        if given:
            words = "on" if value else "off"
            return Setting(
                name="colour", value=value, words=words, source="environment", origin=variable
            )
    return Setting(name="colour", value=None, words="on terminals")
