"""`llmcli env`: this machine, and where each setting comes from."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from llmcli import OPENMP_SPIN, OPENMP_SPIN_BUSY, OPENMP_VARIABLES, WITHIN_QUOTA
from llmcli.commands.env.report import (
    ConfigurationProblem,
    ConfigurationReport,
    ConfiguredOption,
    EnvironmentReport,
    Setting,
)
from llmcli.errors import UsageError
from llmcli.kernels.native import TRITON_VARIABLE as TRITON
from llmcli.kernels.native import VARIABLE as KERNELS
from llmcli.limits import processors
from llmcli.measure.machine import environment
from llmcli.records.document import members
from llmcli.records.machine import CUDA_OPTIONS
from llmcli.shell.configuration import VARIABLES, examined, names_from_file, place, read
from llmcli.shell.options import ModelOptions, PagedOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without

TOLERANT = True  # of a configuration file that is wrong: it is reported
_FIELDS = {"weights": "random_weights"}  # options with another name than their setting


def command(
    model: Annotated[ModelOptions, Without(("edit",))], output: PagedOutputOptions, ctx: Any
) -> None:
    """This machine and its software, and where each setting comes from.

    The header is included in every measured result. Options given here, and those set in the
    configuration file, are shown as other commands would use them. PyTorch is not imported.
    """
    from llmcli.commands.env.view import render_environment

    out = Output("env", output)
    model.check()
    configuration = _configuration(ctx.find_root().command)
    found = settings(model, os.environ, names_from_file(ctx), configuration)
    threads = next(str(setting.value) for setting in found if setting.name == "threads")
    machine = environment()
    if threads.isdecimal():
        machine = replace(machine, threads=int(threads))
    if machine.gpus:
        of_cuda = CUDA_OPTIONS.items()
        found += tuple(_setting(name, on, "on" if on else "off") for name, on in of_cuda)
    report = EnvironmentReport(environment=machine, settings=found, configuration=configuration)
    out.present(lambda: render_environment(report), members(report), environment=machine)


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

    def pick(name: str, default: str | None, words: str = "", *variables: str) -> Setting:
        """The option of that name, else the first variable that is set, else `default`."""
        field = _FIELDS.get(name, name.replace(" ", "_"))
        value = getattr(model, field, None)
        if value != getattr(usual, field, None):
            text, key = "on" if value is True else str(value), field.replace("_", "-")
            if field in from_file:
                return Setting(name=name, value=text, words=text, source="file", origin=key)
            return Setting(name=name, value=text, words=text, source="flag", origin=f"--{key}")
        for variable in variables:
            if text := environ.get(variable, ""):
                return _setting(name, text, text, variable)
        return _setting(name, default, words or default or "")

    def folder(name: str, path: Path, *variables: str) -> Setting:
        whole = path.expanduser().absolute()
        return replace(pick(name, None, "", *variables), value=str(whole), words=_short(whole))

    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(environ.get("HF_HOME") or caches / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    offline = model.offline or offline_from_environment()
    token = pick("hub token", None, "not set", "HF_TOKEN")
    if token.value is not None:
        token = replace(token, value=True, words="set, not shown")
    threads, words = None, f"PyTorch's choice for {processors()} cores"
    if WITHIN_QUOTA:
        threads = str(processors())
        words = f"{threads}, the container's quota"
    file = "none is read" if configuration.path is None else _short(Path(configuration.path))
    if configuration.path is not None and not configuration.exists:
        file += " (no such file)"
    return (
        _setting("configuration", configuration.path, file, place()[1]),
        pick("model", DEFAULT_MODEL, "", *VARIABLES["model"]),
        folder("llmcli cache", cache_dir(), "LLMCLI_CACHE", "XDG_CACHE_HOME"),
        folder("hub cache", hub, "HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"),
        folder("hub home", home, "HF_HOME", "XDG_CACHE_HOME"),
        token,
        replace(
            pick("offline", None, "", *VARIABLES["offline"]),
            value=offline,
            words="on" if offline else "off",
        ),
        pick("revision", None, "the hub's default branch"),
        pick("device", "auto"),
        pick("visible GPUs", None, "all", "CUDA_VISIBLE_DEVICES"),
        *(pick(name, "auto") for name in ("dtype", "quantize", "activations", "cache type")),
        pick("threads", threads, words, *VARIABLES["threads"]),
        pick("kernels", None, "the processor's best", KERNELS),
        _openmp_spin(environ),
        pick("context length", None, "the model's"),
        pick("seed", None, "drawn for each run"),
        pick("weights", None, "the checkpoint's"),
        _colour(environ),
        pick("Triton kernels", None, "all", TRITON),
    )


def _setting(name: str, value: str | bool | None, words: str, variable: str = "") -> Setting:
    """A setting that a variable decides, or that has its default."""
    source: Literal["environment", "default"] = "environment" if variable else "default"
    return Setting(name=name, value=value, words=words, source=source, origin=variable)


def _openmp_spin(environ: Mapping[str, str]) -> Setting:
    """How long OpenMP's threads wait busily: the user's variable, else what the package set."""
    for variable in OPENMP_VARIABLES:
        text = environ.get(variable)
        if text and text not in (OPENMP_SPIN.get(variable), OPENMP_SPIN_BUSY.get(variable)):
            return _setting("OpenMP spin", text, text, variable)
    rounds = environ.get("GOMP_SPINCOUNT", OPENMP_SPIN["GOMP_SPINCOUNT"])
    busy = rounds == OPENMP_SPIN_BUSY["GOMP_SPINCOUNT"]
    return _setting("OpenMP spin", rounds, f"{rounds}{', others run' * busy}")


def _short(path: Path) -> str:
    """`path` with `~` for the home directory."""
    home = Path.home()
    return str("~" / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _colour(environ: Mapping[str, str]) -> Setting:
    """Whether there is colour, and the variable that decides it."""
    if environ.get("NO_COLOR"):
        return _setting("colour", False, "off", "NO_COLOR")
    if environ.get("TERM") == "dumb":
        return _setting("colour", False, "off", "TERM")
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return _setting("colour", True, "on", "FORCE_COLOR")
    return _setting("colour", None, "on terminals")
