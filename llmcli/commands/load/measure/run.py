"""Load a model, or only read its files, and report the use of each tensor."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
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
from llmcli.loading.load import check_loadable, configured, load_checkpoint, resolve_devices
from llmcli.loading.weights import ledger_of
from llmcli.measure.peaks import Peak, resident_bytes
from llmcli.model import Model, dtype_name
from llmcli.prepare.prepared import PrecisionOptions, prepare
from llmcli.records.document import ViewCheck, difference
from llmcli.records.ledger import LedgerEntry, Numbers
from llmcli.records.numbers import counted
from llmcli.records.work import LoadTimings, Progress, no_progress
from llmcli.text import Tokenizer, load_tokenizer

SCANNING = "checking the numbers"
NO_DIGEST = "no sha256 is known for these files, so small changes to a weight go undetected"
_ALIKE = "no block of numbers is an outlier in its tensor"
_HOLE = "from {} on there are only zeros for a while: this part of the file may be missing"
# Two threads are 1.5× as fast on an idle machine; on a busy one they wait for each other after each
# of thousands of small operations, and are many times slower.
_THREADS = 1
_SAMPLE = 4096  # bytes of the beginning, the middle and the end that are compared first
_PIECE = 1 << 22


def measure_load(
    checkpoint: Checkpoint,
    stages: LoadTimings,
    *,
    device: str,
    progress: Progress = no_progress,
    **options: Unpack[PrecisionOptions],
) -> tuple[Model, LoadReport]:
    """Loads the model and reads every parameter, in pieces.

    `stages` have what was done before. Raises the errors of `load_checkpoint`; numbers that are
    not finite and claims that are wrong are reported.
    """
    base = resident_bytes()
    with Peak(resolve_devices(device)[0]) as peak:
        model = load_checkpoint(
            checkpoint,
            device=device,
            text=False,
            progress=progress,
            stages=stages,
            **options,
        )
        with stages("scan", model.weight_bytes):
            numbers = _parameters(model, progress)
    tokenizer, unread = model.tokenizer, None
    if tokenizer is None:  # there is none, or it is broken: the reason is reported
        tokenizer, unread = _tokenizer(checkpoint)
    lines = ledger_lines(model.ledger, checkpoint, model.config, numbers)
    tied = model.decoder.weight("embed.W").nbytes
    return model, _report(
        checkpoint,
        model.config,
        tokenizer,
        lines,
        stages,
        LoadMemory(before=base, peak=peak.resident, device=peak.device),
        unread=unread,
        faults=(not_finite(line.parameter or "", line.numbers) for line in lines),
        checks=[filled_check(lines, model.config)],
        weights=model.weight_bytes,
        numbers=numbers,
        dtype=dtype_name(model.dtype),
        device=model.devices,
        shared=tuple(shared_tensors(checkpoint, model.config, tied)),
    )


def check_files(
    checkpoint: Checkpoint, stages: LoadTimings, *, progress: Progress = no_progress
) -> LoadReport:
    """Reads every tensor as it is stored, a piece at a time: no model is built.

    Where there is a configuration, whether a model can be loaded is known from the headers; if
    it cannot, `fault` says why. Raises CheckpointError where a file changes meanwhile.
    """
    base, config = resident_bytes(), None
    tokenizer = error = unread = None
    lines = tuple(line_of(info) for info in checkpoint.tensors.values())
    with Peak() as peak:
        with stages("plan"):
            try:
                if checkpoint.config is not None:
                    prepared = prepare(checkpoint)
                    config = configured(prepared)
                    check_loadable(prepared)
                    ledger = ledger_of(prepared.plan, checkpoint, prepared.shapes, {})
                    lines = ledger_lines(ledger, checkpoint, config, {})
            except CheckpointError as wrong:
                error = wrong
        if config is not None:
            with stages("tokenizer"):
                tokenizer, unread = _tokenizer(checkpoint)
        with stages("scan", checkpoint.tensor_bytes):
            numbers, outliers, holes = _tensors(checkpoint, progress)
        with stages("hash", checkpoint.nbytes):
            digests, differs, confirmed = digest_checks(checkpoint)
    return _report(
        checkpoint,
        config,
        tokenizer,
        tuple(replace(line, numbers=numbers.get(line.source)) for line in lines),
        stages,
        LoadMemory(before=base, peak=peak.resident, device=peak.device),
        error=error,
        unread=unread,
        faults=(not_finite(name, one) for name, one in numbers.items()),
        checks=[*digests, difference(OUTLIERS, _ALIKE, outliers)],
        notes=[
            *differs,
            *(_HOLE.format(where) for where in holes[:1]),
            *(() if digests or differs else (NO_DIGEST,)),
        ],
        numbers=numbers,
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
        try:
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"cannot read `{file}` any more: {error.strerror}") from error
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


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, CheckpointError | None]:
    try:
        return load_tokenizer(checkpoint), None
    except CheckpointError as error:
        return None, error


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
            found[name] = parameter_numbers(numbers, transposed=known[entry.target].transposed)
            done += nbytes
            progress(SCANNING, done, model.weight_bytes)
    return found


def _tensors(
    checkpoint: Checkpoint, progress: Progress
) -> tuple[dict[str, Numbers], list[str], list[str]]:
    """Statistics of each tensor as it is stored, but for those that cannot be read.

    And the blocks that are outliers in their tensor, and its holes.
    """
    found, outliers, holes = {}, list[str](), list[str]()
    done, held = 0, checkpoint.tensor_bytes
    with devices.threads(_THREADS):
        for name, info in checkpoint.tensors.items():
            numbers = stored_numbers(checkpoint, info)
            if numbers is not None:
                found[name], odd, empty = numbers
                outliers += odd
                holes += empty
            done += info.nbytes
            progress(SCANNING, done, held)
    checkpoint.release()
    return found, outliers, holes


def _report(
    checkpoint: Checkpoint,
    config: ModelConfig | None,
    tokenizer: Tokenizer | None,
    lines: tuple[LedgerEntry, ...],
    stages: LoadTimings,
    memory: LoadMemory,
    *,
    error: CheckpointError | None = None,
    unread: CheckpointError | None,
    faults: Iterable[str],
    checks: Iterable[ViewCheck],
    notes: Iterable[str] = (),
    weights: int | None = None,
    numbers: Mapping[str, Numbers],
    **others: Any,
) -> LoadReport:
    """What both ways have in common, with `others` of the report's fields.

    `unread`: why the tokenizer could not be read; one of an unknown kind is noted, a broken one
    is a fault.
    """
    said = () if tokenizer is None else tokenizer.notes
    if isinstance(unread, UnsupportedModel):
        said = (unread.message,)
    else:
        error = error or unread
    names = ", ".join(name for name in checkpoint.formats if not readable(name))
    unchecked = f"numbers in {names} were not checked" if names else ""
    return LoadReport(
        files=len(checkpoint.files),
        bytes=LoadBytes(files=checkpoint.nbytes, tensors=checkpoint.tensor_bytes, weights=weights),
        memory=memory,
        stages=tuple(
            Stage(name=name, seconds=seconds, bytes=stages.nbytes.get(name))
            for name, seconds in stages.seconds.items()
        ),
        ledger=lines,
        claims=claims(checkpoint, config, tokenizer),
        checks=(ledger_check(lines, checkpoint), layout_check(checkpoint), *checks),
        numbers=sum(one.count for one in numbers.values()),
        notes=tuple(filter(None, [*said, unchecked, *notes])),
        error=error,
        not_finite=next(filter(None, faults), None),
        **others,
    )


def shared_tensors(
    checkpoint: Checkpoint, config: ModelConfig, weight_bytes: int
) -> Iterator[Shared]:
    """A tied head (`weight_bytes`: its bytes in memory), then stored matrices that are equal.

    Vectors are left out: norms are all ones in many a model. Tensors are read whole only where
    samples of them are equal.
    """
    if config.head.tied:
        yield Shared(kind="tied", names=("head.W", "embed.W"), bytes=weight_bytes)
    matrices = (one for one in checkpoint.tensors.values() if len(one.shape) > 1 and one.nbytes)
    for group in _alike(matrices, partial(_sample, checkpoint)):
        for equal in _alike(group, partial(_digest, checkpoint)):
            names = tuple(info.name for info in equal)
            yield Shared(kind="equal", names=names, bytes=equal[0].nbytes)


def _alike(
    infos: Iterable[TensorInfo], key: Callable[[TensorInfo], Hashable]
) -> list[list[TensorInfo]]:
    """Groups of two or more tensors that have the same key."""
    groups: dict[Hashable, list[TensorInfo]] = {}
    for info in infos:
        groups.setdefault(key(info), []).append(info)
    return [group for group in groups.values() if len(group) > 1]


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
