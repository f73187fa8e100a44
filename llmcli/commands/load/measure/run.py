"""Load a model, or only read its files, and report the use of each tensor."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from llmcli import devices
from llmcli.checkpoints import CATALOG, Checkpoint, TensorInfo
from llmcli.checkpoints.files import shown
from llmcli.commands.load.measure.ledger import (
    claims,
    filled_check,
    layout_check,
    ledger_check,
    ledger_lines,
    line_of,
)
from llmcli.commands.load.measure.numbers import parameter_numbers, readable, stored_numbers
from llmcli.commands.load.report import (
    OUTLIERS,
    LoadBytes,
    LoadMemory,
    LoadReport,
    Shared,
    Stage,
)
from llmcli.config.model import ModelConfig
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.graph.graph import graph
from llmcli.inspect.statistics import not_finite
from llmcli.loading.load import check_loadable, configured, load_checkpoint
from llmcli.loading.weights import ledger_of
from llmcli.measure.peaks import Peak, resident_bytes
from llmcli.model import Model, dtype_name
from llmcli.prepare.prepared import PrecisionOptions, prepare
from llmcli.records.document import ViewCheck, difference
from llmcli.records.ledger import LedgerEntry, Numbers
from llmcli.records.numbers import counted
from llmcli.records.work import Progress, Stages, no_progress
from llmcli.text import Tokenizer, load_tokenizer

SCANNING = "checking the numbers"
NO_DIGEST = "no sha256 is known for these files, so small changes to a weight go undetected"
_ALIKE = "no block of numbers is an outlier in its tensor"
# Two threads are 1.5× as fast on an idle machine; on a busy one they wait for each other after each
# of thousands of small operations, and are many times slower.
_THREADS = 1
_SAMPLE = 4096  # bytes of the beginning, the middle and the end that are compared first
_PIECE = 1 << 22


def measure_load(
    checkpoint: Checkpoint,
    stages: Stages,
    *,
    device: str,
    progress: Progress = no_progress,
    **precision: Unpack[PrecisionOptions],
) -> tuple[Model, LoadReport]:
    """Loads the model and reads every parameter, in pieces.

    `stages` have what was done before. Raises the errors of `load_checkpoint`; numbers that are
    not finite and claims that are wrong are reported.
    """
    base = resident_bytes()
    with Peak(devices.resolve_device(device)) as peak:
        model = load_checkpoint(
            checkpoint,
            device=device,
            text=False,
            progress=progress,
            stages=stages,
            **precision,
        )
        with stages("scan", model.weight_bytes):
            numbers = _parameters(model, progress)
    about = _About(config=model.config, tokenizer=model.tokenizer)
    if model.tokenizer is None:  # there is none, or it is broken: the reason is reported
        about = _with_tokenizer(about, checkpoint)
    lines = ledger_lines(model.ledger, checkpoint, model.config, numbers)
    tied = model.decoder.weight("embed.W").nbytes
    return model, _report(
        checkpoint,
        about,
        lines,
        stages,
        LoadMemory(before=base, peak=peak.resident, device=peak.device),
        faults=(not_finite(line.parameter or "", line.numbers) for line in lines),
        checks=[filled_check(lines, model.config)],
        dtype=dtype_name(model.dtype),
        device=str(model.device),
        weights=model.weight_bytes,
        numbers=sum(one.count for one in numbers.values()),
        shared=tuple(shared_tensors(checkpoint, model.config, tied)),
    )


def check_files(
    checkpoint: Checkpoint, stages: Stages, *, progress: Progress = no_progress
) -> LoadReport:
    """Reads every tensor as it is stored, a piece at a time: no model is built.

    Where there is a configuration, whether a model can be loaded is known from the headers; if
    it cannot, `fault` says why. Raises CheckpointError where a file changes meanwhile.
    """
    base = resident_bytes()
    with Peak() as peak:
        with stages("plan"):
            about, lines = _planned(checkpoint)
        if about.config is not None:
            with stages("tokenizer"):
                about = _with_tokenizer(about, checkpoint)
        with stages("scan", checkpoint.tensor_bytes):
            numbers, outliers = _tensors(checkpoint, progress)
        with stages("hash", checkpoint.nbytes):
            digests, differs, confirmed = digest_checks(checkpoint)
    return _report(
        checkpoint,
        about,
        tuple(replace(line, numbers=numbers.get(line.source)) for line in lines),
        stages,
        LoadMemory(before=base, peak=peak.resident, device=peak.device),
        faults=(not_finite(name, one) for name, one in numbers.items()),
        checks=[*digests, difference(OUTLIERS, _ALIKE, outliers)],
        notes=[*differs, *(() if digests or differs else (NO_DIGEST,))],
        numbers=sum(one.count for one in numbers.values()),
        confirmed=confirmed,
    )


def digest_checks(
    checkpoint: Checkpoint,
) -> tuple[tuple[ViewCheck, ...], tuple[str, ...], int]:
    """The sha256 of files for which one is known: checks, notes, and how many files are right.

    A file must have the one by which the hub's cache names what is behind a link, and that of the
    catalog if it is in the catalog's own place. Elsewhere a file of the size of one of the
    catalog's may be another one: a note says whether it is. Raises CheckpointError where a file
    cannot be read any more.
    """
    words, notes, wrong, confirmed = "", list[str](), list[str](), 0
    for file in checkpoint.files:
        size = file.stat().st_size
        entry = next((one for one in CATALOG.values() if one.sha256 and one.size == size), None)
        behind = file.resolve().name if file.is_symlink() else ""
        pinned = re.fullmatch("[0-9a-f]{64}", behind) is not None
        if entry is None and not pinned:
            continue
        digest = _sha256(file)
        if entry is not None and digest == entry.sha256:
            words = f"`{shown(file.name)}` is the catalog's `{entry.name}`"
        elif entry is not None and not pinned and entry.file not in (file, file.parent):
            here = f"`{shown(file.name)}` has the size of the catalog's `{entry.name}`"
            notes.append(f"{here} and differs from it")
            continue
        if digest == (behind if pinned or entry is None else entry.sha256):
            confirmed += 1
        else:
            wrong.append(file.name)
    known = confirmed + len(wrong)
    if not known:
        return (), tuple(notes), 0
    if known > 1 or not words:
        words = f"the sha256 of {counted(known, 'file')} is the published one"
    return (difference("sha256", words, wrong),), tuple(notes), confirmed


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read `{file}` any more: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class _About:
    """What is known of a model before, or without, its weights."""

    config: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    error: CheckpointError | None = None
    note: str = ""


def _planned(checkpoint: Checkpoint) -> tuple[_About, tuple[LedgerEntry, ...]]:
    """The model that the headers describe, and what it makes of them."""
    bare = tuple(line_of(info) for info in checkpoint.tensors.values())
    if checkpoint.config is None:
        return _About(), bare
    config: ModelConfig | None = None
    try:
        prepared = prepare(checkpoint)
        config = configured(prepared)
        check_loadable(prepared)
    except CheckpointError as error:
        return _About(config=config, error=error), bare
    ledger = ledger_of(prepared.plan, checkpoint, prepared.shapes, {})
    return _About(config=config), ledger_lines(ledger, checkpoint, config, {})


def _with_tokenizer(about: _About, checkpoint: Checkpoint) -> _About:
    """A tokenizer of an unknown kind is noted, a broken one is a fault."""
    try:
        return replace(about, tokenizer=load_tokenizer(checkpoint))
    except UnsupportedModel as error:
        return replace(about, note=error.message)
    except CheckpointError as error:
        return about if about.error else replace(about, error=error)


def _parameters(model: Model, progress: Progress) -> dict[str, Numbers]:
    """Statistics of each parameter as it is in memory."""
    found, done, known = {}, 0, graph(model.config).parameters
    with devices.threads(_THREADS):
        for entry in model.ledger.entries:
            weight = model.decoder.weight(entry.target)
            numbers, nbytes = weight.dense(), weight.nbytes
            name = entry.parameter or ""
            if item := name[len(entry.target) + 1 : -1]:
                numbers = numbers[int(item)]
                nbytes //= weight.shape[0]
            found[name] = parameter_numbers(numbers, turned=known[entry.target].turned)
            done += nbytes
            progress(SCANNING, done, model.weight_bytes)
    return found


def _tensors(
    checkpoint: Checkpoint, progress: Progress
) -> tuple[dict[str, Numbers], list[str]]:
    """Statistics of each tensor as it is stored, but for those that cannot be read.

    And the blocks that are outliers in their tensor.
    """
    found, outliers, done, held = {}, list[str](), 0, checkpoint.tensor_bytes
    with devices.threads(_THREADS):
        for name, info in checkpoint.tensors.items():
            numbers = stored_numbers(checkpoint, info)
            if numbers is not None:
                found[name], odd = numbers
                outliers += odd
            done += info.nbytes
            progress(SCANNING, done, held)
    checkpoint.release()
    return found, outliers


def _report(
    checkpoint: Checkpoint,
    about: _About,
    lines: tuple[LedgerEntry, ...],
    stages: Stages,
    memory: LoadMemory,
    *,
    faults: Iterable[str],
    checks: Iterable[ViewCheck],
    notes: Iterable[str] = (),
    weights: int | None = None,
    **others: Any,
) -> LoadReport:
    """What both ways have in common, with `others` of the report's fields."""
    names = ", ".join(name for name in checkpoint.formats if not readable(name))
    unread = f"numbers in {names} were not checked" if names else ""
    said = () if about.tokenizer is None else about.tokenizer.notes
    return LoadReport(
        files=len(checkpoint.files),
        bytes=LoadBytes(
            files=checkpoint.nbytes, tensors=checkpoint.tensor_bytes, weights=weights
        ),
        memory=memory,
        stages=tuple(
            Stage(name=name, seconds=seconds, bytes=stages.nbytes.get(name))
            for name, seconds in stages.seconds.items()
        ),
        ledger=lines,
        claims=claims(checkpoint, about.config, about.tokenizer),
        checks=(ledger_check(lines, checkpoint), layout_check(checkpoint), *checks),
        notes=tuple(filter(None, [about.note, *said, unread, *notes])),
        error=about.error,
        not_finite=next(filter(None, faults), None),
        **others,
    )


def shared_tensors(
    checkpoint: Checkpoint, config: ModelConfig | None, weight_bytes: int | None
) -> Iterator[Shared]:
    """A tied head (`weight_bytes`: its bytes in memory), then stored matrices that are equal.

    Vectors are left out: norms are all ones in many a model. Tensors are read whole only where
    samples of them are equal.
    """
    if config is not None and config.head.tied:
        yield Shared(kind="tied", names=("head.W", "embed.W"), bytes=weight_bytes or 0)
    alike: dict[Hashable, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        if len(info.shape) > 1 and info.nbytes:
            alike.setdefault(_sample(checkpoint, info), []).append(info)
    for group in alike.values():
        if len(group) < 2:
            continue
        same: dict[bytes, list[TensorInfo]] = {}
        for info in group:
            same.setdefault(_digest(checkpoint, info), []).append(info)
        for equal in same.values():
            if len(equal) > 1:
                names = tuple(info.name for info in equal)
                yield Shared(kind="equal", names=names, bytes=equal[0].nbytes)


def _sample(checkpoint: Checkpoint, info: TensorInfo) -> Hashable:
    """A key that equal tensors have in common, and few others."""
    starts = (0, info.nbytes // 2, max(0, info.nbytes - _SAMPLE))
    pieces = (
        bytes(checkpoint.read(info.name, start, min(start + _SAMPLE, info.nbytes)))
        for start in starts
    )
    return info.format, info.shape, hashlib.blake2b(b"".join(pieces)).digest()


def _digest(checkpoint: Checkpoint, info: TensorInfo) -> bytes:
    found = hashlib.blake2b()
    for start in range(0, info.nbytes, _PIECE):
        found.update(checkpoint.read(info.name, start, min(start + _PIECE, info.nbytes)))
    return found.digest()
