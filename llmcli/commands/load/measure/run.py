"""Load a model, or only read its files, and report the use of each tensor."""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from llmcli import devices
from llmcli.checkpoints import CATALOG, Checkpoint, TensorInfo
from llmcli.checkpoints.files import read_object, shown
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.commands.load.measure.numbers import parameter_numbers, readable, stored_numbers
from llmcli.commands.load.report import (
    OUTLIERS,
    LoadBytes,
    LoadMemory,
    LoadReport,
    MetadataCheck,
    Shared,
    Stage,
)
from llmcli.config.model import ModelConfig
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.graph.graph import graph
from llmcli.graph.plan import parameters
from llmcli.inspect.statistics import not_finite
from llmcli.loading.load import check_loadable, configured, load_checkpoint
from llmcli.loading.weights import ledger_of
from llmcli.measure.peaks import Peak, resident_bytes
from llmcli.model import Model, dtype_name
from llmcli.prepare.prepared import PrecisionOptions, prepare
from llmcli.records.document import ViewCheck, difference
from llmcli.records.ledger import Ledger, LedgerEntry, Numbers
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
_ALIGNMENT = 32  # of GGUF, where a file does not say another
_TYPE_AND_OFFSET = 12  # bytes that end a row of its table
_QUANTIZATION = 2  # the version of the layout of blocks since May 2023, and the only one known
_PLAIN = {"F64", "F32", "F16", "BF16"}  # formats without blocks


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
        device=str(model.device),
        shared=tuple(shared_tensors(checkpoint, model.config, tied)),
    )


def check_files(
    checkpoint: Checkpoint, stages: Stages, *, progress: Progress = no_progress
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
            numbers, outliers = _tensors(checkpoint, progress)
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
        notes=[*differs, *(() if digests or differs else (NO_DIGEST,))],
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
    config: ModelConfig | None,
    tokenizer: Tokenizer | None,
    lines: tuple[LedgerEntry, ...],
    stages: Stages,
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
        bytes=LoadBytes(
            files=checkpoint.nbytes, tensors=checkpoint.tensor_bytes, weights=weights
        ),
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
    """Those of one key, where they are several."""
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


# what became of every tensor


def ledger_lines(
    ledger: Ledger, checkpoint: Checkpoint, config: ModelConfig, numbers: Mapping[str, Numbers]
) -> tuple[LedgerEntry, ...]:
    """Parameters in the model's order, then scales, then what is dropped.

    `numbers` by what an entry fills. A tensor that the ledger does not have is in no line: see
    `ledger_check`.
    """
    place = {spec.name: at for at, spec in enumerate(parameters(config))}
    filled = sorted(ledger.entries, key=lambda entry: place[entry.target])
    scales = {name: entry.source for entry in filled for name in entry.scale_tensors}
    others = [
        *((name, f"belongs to the scale of `{source}`") for name, source in scales.items()),
        *ledger.dropped,
    ]
    return (
        *(replace(entry, numbers=numbers.get(entry.parameter or "")) for entry in filled),
        *(replace(line_of(checkpoint.tensors[name]), reason=reason) for name, reason in others),
    )


def line_of(info: TensorInfo) -> LedgerEntry:
    """A tensor whose model is unknown."""
    return LedgerEntry(
        source=info.name, stored=info.format, shape=info.shape, bytes=info.nbytes
    )


def ledger_check(lines: tuple[LedgerEntry, ...], checkpoint: Checkpoint) -> ViewCheck:
    """That the lines have every byte of every tensor, once."""
    left = {info.name: info.nbytes for info in checkpoint.tensors.values()}
    for line in lines:
        left[line.source] -= line.bytes
    wrong = {name: abs(count) for name, count in left.items() if count}
    held, tensors = checkpoint.tensor_bytes, len(checkpoint.tensors)
    of = f"{held:,} bytes of {counted(tensors, 'tensor')}"
    words = f"the ledger lists each of the {of} exactly once"
    return _none_wrong("ledger", words, wrong)


def filled_check(lines: tuple[LedgerEntry, ...], config: ModelConfig) -> ViewCheck:
    """That every number of every parameter was read where it is in memory."""
    wanted = {spec.name: spec.count for spec in parameters(config)}
    total = sum(wanted.values())
    for line in lines:
        if line.numbers is not None and line.parameter is not None:
            wanted[line.target] -= line.numbers.count
    wrong = {name: abs(count) for name, count in wanted.items() if count}
    words = f"each of the {total:,} parameters was filled and checked"
    return _none_wrong("parameters", words, wrong)


def _none_wrong(name: str, words: str, wrong: Mapping[str, int]) -> ViewCheck:
    """The check that `wrong` (place → how much) is empty; `where` is the place of the largest."""
    return ViewCheck(
        name=name,
        words=words,
        value=float(sum(wrong.values())),
        tolerance=0.0,
        where=max(wrong, key=wrong.__getitem__, default=""),
    )


# bytes that nothing owns


def layout_check(checkpoint: Checkpoint) -> ViewCheck:
    """That between and after the tensors of each file there is nothing but padding."""
    unowned = dict[str, int]()  # after what, how many bytes beyond what the alignment asks for
    said = checkpoint.metadata.get("general.alignment", _ALIGNMENT)
    step = said if checkpoint.kind == "gguf" and type(said) is int else 1
    files: dict[Path, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        files.setdefault(info.file, []).append(info)
    for path, infos in files.items():
        if checkpoint.kind == "gguf":
            unowned["the end of the header"] = _before(path, infos, step)
        infos.sort(key=lambda info: info.offset)
        starts = [info.offset for info in infos[1:]]
        for info, following in zip(infos, [*starts, os.path.getsize(path)], strict=True):
            end = info.offset + info.nbytes
            padded = -(-end // step) * step
            unowned[f"the end of {info.name}"] = max(0, following - padded)
    many = len(checkpoint.files)
    words = f"no byte of the {'file' if many == 1 else f'{many} files'} is left over"
    return _none_wrong("layout", words, {where: count for where, count in unowned.items() if count})


def _before(path: Path, infos: Sequence[TensorInfo], step: int) -> int:
    """Bytes between the padded header of a GGUF file, which ends with its table, and the data.

    `infos` are in the table's order, as they are read.
    """
    first, last = min(info.offset for info in infos), infos[-1]
    name = last.name.encode()
    dims = last.shape[::-1]
    row = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    with path.open("rb") as file:
        end = file.read(first).rfind(row) + len(row) + _TYPE_AND_OFFSET
    return max(0, first - -(-end // step) * step)


# what files say of their tensors


def claims(
    checkpoint: Checkpoint, config: ModelConfig | None, tokenizer: Tokenizer | None
) -> tuple[MetadataCheck, ...]:
    """Each claim with what is true; there is none about what a file does not say."""
    found = [*_totals(checkpoint, config), *_gguf(checkpoint, config)]
    if config is not None and tokenizer is not None:
        found += _tokens(checkpoint, config.vocab, tokenizer)
    return tuple(found)


def _claim(
    name: str,
    what: str,
    says: object,
    holds: object,
    *,
    ok: bool | None = None,
    must: bool = True,
) -> MetadataCheck:
    """True (`ok`) if both are equal, unless given; long values are cut, for a file may have any."""
    words = [f"{one:,}" if isinstance(one, int) else str(one)[:80] for one in (says, holds)]
    ok = says == holds if ok is None else ok
    return MetadataCheck(name=name, what=what, says=words[0], holds=words[1], ok=ok, must=must)


def _totals(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[MetadataCheck]:
    """The totals that an index has in its `metadata`."""
    path = checkpoint.path / INDEX
    if not os.path.isdir(checkpoint.path) or os.path.exists(checkpoint.path / SINGLE):
        return  # the index of shards that are not the ones that were opened
    given = (read_object(path) or {}).get("metadata")
    said: Mapping[str, Any] = given if isinstance(given, dict) else {}
    if (total := said.get("total_size")) is not None:
        where = f"`total_size` in {INDEX}"
        yield _claim("total_size", where, total, checkpoint.tensor_bytes)
    if (total := said.get("total_parameters")) is not None:
        held = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        learned = None if config is None else sum(spec.count for spec in parameters(config))
        held = learned if learned and total == learned else held
        yield _claim("total_parameters", f"`total_parameters` in {INDEX}", total, held)


def _gguf(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[MetadataCheck]:
    """The layout of blocks, how many tensors a file in parts has, and rows of the embedding.

    Opening it has compared the parts with each other.
    """
    if checkpoint.kind != "gguf":
        return
    metadata = checkpoint.metadata
    blocks = {info.format for info in checkpoint.tensors.values() if len(info.shape) > 1}
    version = metadata.get("general.quantization_version")
    if version is not None and blocks - _PLAIN:
        where = "`general.quantization_version`"
        yield _claim("quantization_version", where, version, _QUANTIZATION)
    tensors = metadata.get("split.tensors.count")
    if type(tensors) is int and tensors > 0:
        yield _claim("split_tensors", "`split.tensors.count`", tensors, len(checkpoint.tensors))
    key = f"{checkpoint.model_type}.vocab_size"
    if config is not None and (said := metadata.get(key)) is not None:
        yield _claim("vocab_size", f"`{key}`", said, config.vocab)


def _tokens(checkpoint: Checkpoint, rows: int, tokenizer: Tokenizer) -> Iterator[MetadataCheck]:
    """Tokens need `rows` of the embedding; rows without a token are padding and usual.

    The ids of begin and end are those of the files; our configuration keeps only usable ones.
    """
    tokens, held = tokenizer.vocab_size, counted(rows, "row") + " of the embedding"
    yield _claim("tokens", "the tokenizer's tokens", tokens, held, ok=tokens <= rows)
    ids = set(tokenizer.eos_ids)
    for settings in (checkpoint.config or {}, checkpoint.generation_config or {}):
        for key in ("bos_token_id", "eos_token_id"):
            found = settings.get(key)
            listed = found if isinstance(found, list) else [found]
            ids |= {id for id in listed if type(id) is int}
    if tokenizer.bos_id is not None:
        ids.add(tokenizer.bos_id)
    if ids:  # an end that cannot be written is only ever missed
        said, ok = ", ".join(map(str, sorted(ids))), max(ids) < rows
        yield _claim("special_tokens", "ids of begin and end", said, held, ok=ok, must=False)
