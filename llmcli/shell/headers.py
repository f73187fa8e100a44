"""Opens the headers of a checkpoint and chooses devices, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError
from llmcli.records.info import NO_FORMATS
from llmcli.shell.options import ModelOptions
from llmcli.shell.output import Output
from llmcli.shell.progress import Progress
from llmcli.shell.running import open_checkpoint_of

if TYPE_CHECKING:
    from llmcli.anatomy.arithmetic import Arithmetic
    from llmcli.checkpoints import Checkpoint
    from llmcli.config import ModelConfig
    from llmcli.records.info import Device


@contextmanager
def opened_headers(
    model: ModelOptions, out: Output, *, weights: bool = True
) -> Iterator[tuple[Checkpoint, str]]:
    """Opens a checkpoint; of one on the hub that is not on this machine, fetches the headers only.

    Yields the checkpoint and its place. Without `weights`: only the files beside them, for commands
    that need the tokenizer alone.
    """
    from llmcli.checkpoints import open_checkpoint
    from llmcli.checkpoints.catalog import offline_from_environment
    from llmcli.checkpoints.hub.download import cached
    from llmcli.checkpoints.hub.headers import fetched_headers, on_the_hub
    from llmcli.checkpoints.locate import default_model, note_directory

    model.check()
    spec = model.model or default_model()
    found = on_the_hub(spec, model.revision)
    part = None if found is None or weights else cached(found, weights=False)
    offline = model.offline or offline_from_environment()
    if found is None or (part is None and (offline or cached(found))):
        checkpoint = open_checkpoint_of(model, out)
        yield checkpoint, str(checkpoint.path)
        return
    note_directory(spec, out.note)
    if part is not None:
        yield open_checkpoint(part, name=spec, weights=False), str(part)
    else:
        with (
            Progress(out) as progress,
            fetched_headers(found, weights=weights, progress=progress) as (path, commit),
        ):
            checkpoint = open_checkpoint(path, name=spec, weights=weights)
            yield checkpoint, f"{found.repository}@{commit} on the hub"


def chosen_devices(name: str, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices to compare with; the first is the one that a run would use.

    Raises UsageError for a device that does not exist.
    """
    if name == "auto":
        return tuple(sorted(devices, key=lambda device: not device.usable))
    wanted = "cuda:0" if name == "cuda" else name
    found = tuple(device for device in devices if device.device == wanted)
    if not found:
        there = ", ".join(device.device for device in devices)
        raise UsageError(f"there is no device `{name}` here", hint=f"there is: {there}")
    return found


def unloaded_model(checkpoint: Checkpoint, place: str) -> dict[str, Any]:
    """The `model` object of documents about the files alone: see `Model.describe`."""
    return {
        "name": checkpoint.name,
        "path": place,
        "stored_formats": checkpoint.formats,
        **NO_FORMATS,
    }


def model_of_headers(
    checkpoint: Checkpoint, place: str, config: ModelConfig, numbers: Arithmetic, device: str
) -> dict[str, Any]:
    """The `model` object of a model that would be held in arithmetic `numbers` on `device`."""
    weights = numbers.parameters(config)
    return unloaded_model(checkpoint, place) | {
        "family": config.family,
        "model_type": config.model_type,
        "parameters": sum(spec.count for spec in weights),
        "context": config.context,
        **numbers.describe(config),
        "weight_bytes": sum(spec.bytes or 0 for spec in weights),
        "device": device,
        "random_weights_seed": None,
    }
