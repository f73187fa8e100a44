"""From the common options to a model that runs, with progress and the notes a user needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.errors import LlmcliError, UsageError
from llmcli.records.numbers import counted
from llmcli.shell.exits import SIGNALS
from llmcli.shell.options import MODEL, ModelOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.config.model import ModelConfig
    from llmcli.engine.speculation import Speculation
    from llmcli.graph.edited import EditRequest
    from llmcli.graph.precision import Precision
    from llmcli.model import Model
    from llmcli.prepare.ahead import Prefetcher
    from llmcli.prepare.prepared import PrecisionOptions, Prepared
    from llmcli.records.info import Device
    from llmcli.records.text import PhasePeak

_TORCH = ("torch linear", "torch scaled_dot_product_attention")


def _kernels_of(*models: Mapping[str, Any]) -> tuple[str, ...]:
    """What computes the forward passes of models (`Model.describe`), our own kernels first.

    They take products of packed weights, and on a CPU of bfloat16 weights, or of 16-bit weights
    with float32 activations (`ops.product`); on a card they are Triton's, where these are on.
    """
    from llmcli.kernels import native

    taken = any(
        m["product_format"].startswith("int")
        or (str(m["device"]).endswith("cpu") and m["weight_format"] == "bfloat16")
        or (m["weight_format"], m["product_format"]) == ("float16", "float32")
        for m in models
    )
    card = any(
        str(m["device"]).startswith("cuda") and m["product_format"] != "float64" for m in models
    )
    names = (native.level() if taken else None, native.TRITON if card and native.triton() else None)
    return (*(f"llmcli {name}" for name in names if name), *_TORCH)


def header(*models: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a document: the first of the models that ran, and what computed all of them."""
    from llmcli.measure.machine import environment

    model = models[0] if models else None
    return {"model": model, "environment": environment(kernels=_kernels_of(*models))}


@dataclass(frozen=True)
class Loaded:
    """A model and the seconds that it took: `import_s` for torch, `load_s` for the rest.

    Of that `open_s` for the headers. Fetching is in none of them: it happens once. `peaks`: the
    memory held before loading, and the most while loading. `before`: what `before` has returned.
    """

    model: Model
    import_s: float
    load_s: float
    peaks: tuple[PhasePeak, ...]
    open_s: float
    before: Any = None


def load_model(
    options: ModelOptions,
    out: Output,
    *,
    text: bool,
    spec: str | None = None,
    check: Callable[[ModelConfig], None] | None = None,
    before: Callable[[Prepared], Any] | None = None,
    wide: bool = False,
) -> Loaded:
    """Finds and loads the model of the options (`spec` instead of `--model` where given).

    `text`: whether it will be given text; ids need no tokenizer, so one of an unknown kind is
    no error then. The headers are read before torch is imported: a name that does not exist and
    an architecture that is not supported fail at once, and so does what `check(config)` refuses
    of the other options. `before(prepared)` is called when torch is imported and only the headers
    of the model are read. `wide`: where no dtype is given it is at least float32; packed weights
    stay packed. Raises the errors of `open_model`, `check`, `before` and `load_checkpoint`.
    """
    from llmcli.graph.precision import WIDE
    from llmcli.measure.peaks import Peak, highest_bytes, resident_bytes
    from llmcli.records.text import PhasePeak

    options.check()
    checkpoint, open_s = opened(options, out, spec)
    from llmcli.prepare.placement import listed, placement_words
    from llmcli.prepare.prepared import prepare

    begin = perf_counter()
    prepared = prepare(checkpoint, random=options.weights_seed is not None)
    open_s += perf_counter() - begin
    if check is not None:
        check(prepared.config)
    edits = edit_requests(options.edit or (), prepared.config, options.seed or 0)
    loading = f"loading {checkpoint.name} …"
    require_cwd()
    begin = perf_counter()
    precision_options = options.precision_options
    if wide and options.dtype == "auto":
        precision_options["dtype"] = WIDE
    # `before` measures a machine that holds nothing of the model
    ahead = None if before is not None else _ahead(options, prepared, precision_options)
    with Progress(out, loading), SIGNALS.abrupt():
        import torch

        from llmcli.devices import gib
        from llmcli.loading.load import load_checkpoint

    imported = perf_counter()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = None if before is None else before(prepared)
    base = resident_bytes()
    if base is not None and ahead is not None:  # what it has read is the model's
        base -= ahead.resident
    begun = perf_counter()
    with Progress(out, loading) as progress, Peak() as filling:
        model = load_checkpoint(
            checkpoint,
            device=options.device,
            random_weights=options.weights_seed,
            text=text,
            progress=progress,
            ahead=ahead,
            prepared=prepared,
            context=options.context_length,
            **precision_options,
        )
    model.edits = edits
    load_s = open_s + perf_counter() - begun
    SIGNALS.check()
    if "," in options.device:
        placed, home = [*map(str, model.decoder.placed)], str(model.device)
        words = placement_words(listed(options.device), placed, home)
        out.note(f"{checkpoint.name}: {words}")  # a draft has its own
    check_context(options, model.config.context, model.config.embedding.positions, out)
    for note in () if model.tokenizer is None or not text else model.tokenizer.notes:
        out.note(note)
    if not options.random_weights:
        note_quantize(options, checkpoint, out)
    note_tensors(checkpoint, model.ledger.surplus, out)
    if options.activations != "auto" and not model.decoder.precision.rounds_inputs:
        out.note(
            f"`--activations {options.activations}` has no effect: no weights are multiplied in "
            "blocks"
        )
    if model.mapped_bytes:
        out.note(
            f"{gib(model.mapped_bytes)} of weights do not fit into the free memory: they stay in "
            "the mapped file, which each step reads"
        )
    first = model.decoder.devices[0]
    on_gpu = highest_bytes(first) if first.type == "cuda" else None
    peaks = (
        PhasePeak(phase="base", resident_bytes=base, device_bytes=None),
        PhasePeak(phase="load", resident_bytes=filling.resident, device_bytes=on_gpu),
    )
    return Loaded(model, imported - begin, load_s, peaks, open_s, found)


def edit_requests(
    texts: Sequence[str], config: ModelConfig, seed: int = 0
) -> tuple[EditRequest, ...]:
    """The edits NAME[INDEX]=WHAT. Raises UsageError for one that no prompt could have."""
    if not texts:
        return ()
    from llmcli.families.sources import sources
    from llmcli.graph.edited import parse_edit
    from llmcli.graph.names import Names

    names = Names(config, sources(config))
    return tuple(parse_edit(text, names, seed) for text in texts)


def note_edits(model: Model, out: Output) -> None:
    """A note for every edit that has not changed a number."""
    for text, changed in model.changed.items():
        if not changed:
            out.note(f"`--edit {text}` has changed nothing")


def note_tensors(checkpoint: Checkpoint, surplus: Sequence[str], out: Output) -> None:
    """Notes where names of tensors have a wrapper's beginning, or the model has no use for some."""
    from llmcli.checkpoints.files import listed, shown

    if checkpoint.wrapper:
        out.note(f"every tensor's name begins with `{shown(checkpoint.wrapper)}`: read without it")
    if surplus:
        out.note(
            f"{counted(len(surplus), 'tensor')} not used, for which the model has no parameter: "
            f"{listed(list(surplus))}"
        )


def note_quantize(options: ModelOptions, checkpoint: Checkpoint, out: Output) -> None:
    """A note where `--quantize` changes nothing of weights that are known to be readable."""
    from llmcli.prepare.prepared import quantize_without_effect

    if words := quantize_without_effect(checkpoint, options.quantize):
        out.note(words)


def _ahead(
    options: ModelOptions, prepared: Prepared, precision_options: PrecisionOptions
) -> Prefetcher | None:
    """Starts to read weights that a CPU keeps in blocks, if that is where they will be."""
    from llmcli.measure.machine import cpu, machine_devices
    from llmcli.prepare.ahead import start

    if options.device not in ("auto", "cpu") or options.weights_seed is not None:
        return None
    first, *others = (cpu(),) if options.device == "cpu" else machine_devices()
    if others:
        return None
    return start(prepared, bfloat16=first.bfloat16, free=first.free_bytes, **precision_options)


def require_supported(options: ModelOptions, out: Output, spec: str) -> None:
    """Raises what `load_model` would for `spec` before it imports torch: a second model's turn."""
    from llmcli.families import describe

    describe(opened(options, out, spec)[0])


def require_cwd() -> None:
    """Raises LlmcliError where the current directory is gone: torch ends the process there."""
    try:
        os.getcwd()
    except OSError as error:
        raise LlmcliError(
            "the current directory no longer exists",
            hint="change to another one with `cd`, then run this command again",
        ) from error


def opened(
    options: ModelOptions, out: Output, spec: str | None = None
) -> tuple[Checkpoint, float]:
    """The checkpoint, and the seconds that reading its headers took (not fetching it)."""
    from llmcli.checkpoints import open_checkpoint
    from llmcli.checkpoints.locate import find

    spec = options.model if spec is None else spec
    revision = options.revision if spec == options.model else None
    with Progress(out) as progress:
        name, path = find(
            spec, revision=revision, offline=options.offline, progress=progress, note=out.note
        )
        begin = perf_counter()
        return open_checkpoint(path, name=name), perf_counter() - begin


def check_context(options: ModelOptions, trained: int, positions: int | None, out: Output) -> None:
    """A longer context than trained for: a note, or UsageError where it cannot exist."""
    wanted = options.context_length
    if wanted is None:
        return
    if positions is not None and wanted > positions:
        raise UsageError(
            f"`--context-length {wanted}` is more than the {positions:,} positions that the model "
            "has learned",
            hint=f"use at most {positions}",
        )
    if wanted > trained:
        out.note(
            f"the model was trained for {trained:,} tokens: beyond them, with a context "
            f"length of {wanted:,}, its text gets worse"
        )


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
        checkpoint = opened(model, out)[0]
        yield checkpoint, str(checkpoint.path)
        return
    note_directory(spec, out.note)
    if part is not None:
        yield open_checkpoint(part, name=spec, weights=False), str(part)
    else:
        with ExitStack() as stack:
            with Progress(out) as progress:
                headers = fetched_headers(found, weights=weights, progress=progress)
                path, commit = stack.enter_context(headers)
            checkpoint = open_checkpoint(path, name=spec, weights=weights)
            yield checkpoint, f"{found.repository}@{commit} on the hub"


def chosen_devices(name: str, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices to compare with; the first is the one that a run would use, or fill first.

    Raises UsageError for a device that does not exist.
    """
    from llmcli.prepare.placement import listed

    if name == "auto":
        return tuple(sorted(devices, key=lambda device: not device.usable))
    known = {device.device: device for device in devices}
    found = []
    for wanted in listed(name):
        device = known.get("cuda:0" if wanted == "cuda" else wanted)
        if device is None:
            there = ", ".join(known)
            raise UsageError(f"there is no device `{wanted}` here", hint=f"there is: {there}")
        found.append(device)
    return tuple(found)


def unloaded_model(checkpoint: Checkpoint, place: str) -> dict[str, Any]:
    """The `model` object of documents about the files alone: see `Model.describe`."""
    from llmcli.records.info import NO_FORMATS

    return {
        "name": checkpoint.name,
        "path": place,
        "stored_formats": checkpoint.formats,
        **NO_FORMATS,
    }


def model_of_headers(
    checkpoint: Checkpoint, place: str, config: ModelConfig, precision: Precision, device: str
) -> dict[str, Any]:
    """The `model` object of a model that would be held in `precision` on `device`."""
    weights = precision.parameters(config)
    return unloaded_model(checkpoint, place) | {
        "family": config.family,
        "model_type": config.model_type,
        "parameters": sum(spec.count for spec in weights),
        "context": config.context,
        **precision.describe(config),
        "weight_bytes": sum(spec.bytes for spec in weights),
        "device": device,
        "random_weights_seed": None,
    }


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Speculative decoding: whether tokens are drafted, and by which model."""

    panel: ClassVar[str] = MODEL
    draft: str | None = opt(
        None,
        "--draft MODEL|ngram",
        "Speculative decoding: a smaller model of the same vocabulary, or what followed the same "
        "tokens before, proposes tokens. The text stays the same: bit by bit with packed weights "
        "on a CPU, elsewhere within rounding.",
    )

    def load(self, model: Model, options: ModelOptions, out: Output) -> Speculation | None:
        """Loads the draft, None without `--draft`.

        Raises the errors of `load_model`, and UsageError for another vocabulary.
        """
        if self.draft is None:
            return None
        from llmcli.engine.drafts import ModelDraft, NgramDraft
        from llmcli.engine.speculation import Speculation

        if self.draft == "ngram":
            return Speculation(NgramDraft())
        small = load_model(
            replace(options, model=self.draft, revision=None, context_length=None), out, text=True
        )
        return Speculation(ModelDraft(small.model, model))
