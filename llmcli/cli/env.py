"""`llmcli env`: this machine, and where each setting comes from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from llmcli.cli.options import ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.measure.environment import environment, usable_cores
from llmcli.reports import EnvironmentReport, Setting


def command(model: ModelOptions, output: OutputOptions) -> None:
    """This machine and its software, and where each setting comes from.

    The header is the one that goes into every measured result. Options given here are shown as
    they would be used by other commands. PyTorch is not imported.
    """
    out = Output("env", output)
    model.check()
    report = EnvironmentReport(
        environment=environment(), settings=settings(model, output, os.environ)
    )
    if out.json:
        out.document({"settings": report.settings}, model=None, environment=report.environment)
        return
    from llmcli.render.environment import render_environment

    out.show(render_environment(report))


def settings(
    model: ModelOptions, output: OutputOptions, environ: Mapping[str, str]
) -> tuple[Setting, ...]:
    """Every setting with its value and its source; secrets are only said to be set."""
    from llmcli.checkpoints import cache_dir
    from llmcli.checkpoints.locate import DEFAULT_MODEL

    def pick(
        name: str,
        flag: tuple[str, object],
        variables: tuple[str, ...],
        default: str,
        shown: Callable[[str], str] = str,
    ) -> Setting:
        option, value = flag
        if value not in (None, False):
            text = "on" if value is True else str(value)
            return Setting(name=name, value=text, source="flag", origin=option)
        for variable in variables:
            if environ.get(variable):
                text = shown(environ[variable])
                return Setting(name=name, value=text, source="environment", origin=variable)
        return Setting(name=name, value=default, source="default", origin="")

    none = ("", None)
    home = "~/.cache/huggingface"
    hub = environ.get("HF_HOME") or home
    chosen = [
        pick("model", ("--model", model.model), ("LLMCLI_MODEL",), DEFAULT_MODEL),
        pick(
            "llmcli cache",
            none,
            ("LLMCLI_CACHE", "XDG_CACHE_HOME"),
            str(cache_dir()),
            lambda _: str(cache_dir()),
        ),
        pick("hub cache", none, ("HF_HUB_CACHE",), str(Path(hub) / "hub")),
        pick("hub home", none, ("HF_HOME",), home),
        pick("hub token", none, ("HF_TOKEN",), "not set", lambda _: "set, not shown"),
        pick(
            "offline",
            ("--offline", model.offline),
            ("LLMCLI_OFFLINE", "HF_HUB_OFFLINE"),
            "off",
        ),
        pick("revision", ("--revision", model.revision), (), "the hub's default branch"),
        pick("device", ("--device", _unless(model.device, "auto")), (), "auto"),
        pick("visible GPUs", none, ("CUDA_VISIBLE_DEVICES",), "all"),
        pick("dtype", ("--dtype", _unless(model.dtype, "auto")), (), "auto"),
        pick("quantize", ("--quantize", _unless(model.quantize, "auto")), (), "auto"),
        pick(
            "threads",
            ("--threads", model.threads),
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
            f"PyTorch's choice for {usable_cores()} cores",
        ),
        pick("context length", ("--context-length", model.context_length), (), "the model's"),
        pick("seed", ("--seed", model.seed), (), "drawn for each run"),
        pick("weights", ("--random-weights", model.random_weights), (), "the checkpoint's"),
        _colour(environ),
    ]
    return tuple(chosen)


def _unless(value: str, default: str) -> str | None:
    return None if value == default else value


def _colour(environ: Mapping[str, str]) -> Setting:
    """What decides about colour, in the order of precedence."""
    value, variable = "on terminals", ""
    if environ.get("NO_COLOR"):
        value, variable = "off", "NO_COLOR"
    elif environ.get("TERM") == "dumb":
        value, variable = "off", "TERM"
    elif environ.get("FORCE_COLOR", "0") not in ("", "0"):
        value, variable = "on", "FORCE_COLOR"
    if variable:
        return Setting(name="colour", value=value, source="environment", origin=variable)
    return Setting(name="colour", value=value, source="default", origin="")
