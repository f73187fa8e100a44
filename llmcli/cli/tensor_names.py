"""The names of models, of their tensors and layers, for completion in a shell. No torch.

Read from headers and from the names of cached files; the network is never used. What a model has
is kept in `completion/` of llmcli's cache until its file changes: finding it takes 0.2 s, reading
it 1 ms.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.errors import LlmcliError

if TYPE_CHECKING:
    from llmcli.checkpoints.names import HubId

KINDS = {
    "names": ("activation", "state", "parameter"),
    "tensor": ("activation", "parameter"),
    "weights": ("parameter",),
}
_LAYER = re.compile(r"(blocks|cache)\.([^.]*)\.")
_MOST = 64  # files of names that are kept

Tensors = dict[str, list[str]]  # kind → names


def tensor_names(kind: str, word: str, line: Sequence[str]) -> Iterator[str]:
    """Names and patterns of tensors behind the last comma of `word`; `tensor`: the name of one.

    `kind` is one of `KINDS`, `line` the words before, which may name the model.
    """
    found = _tensors(line)
    head, comma, part = word.rpartition(",") if kind != "tensor" else ("", "", word)
    names = [name for one in KINDS[kind] for name in found[one]]
    return (f"{head}{comma}{name}" for name in _names(part, names, globs=kind != "tensor"))


def _names(part: str, names: Sequence[str], *, globs: bool) -> Iterator[str]:
    """Names from the left: those outside of layers, which layers there are, what is in one."""
    end = "" if globs else "["
    typed = _LAYER.match(part)
    inside = [(found[1], found[2], name[found.end() :]) for name in names
              if (found := _LAYER.match(name))]  # fmt: skip
    if typed:
        rests = dict.fromkeys(
            rest for root, layer, rest in inside
            if root == typed[1] and (layer == typed[2] or not typed[2].isdigit() or layer == "*")
        )  # fmt: skip
        yield from (f"{typed[0]}{rest}{end}" for rest in rests)
        return
    yield from (f"{name}{end}" for name in names if not _LAYER.match(name))
    for root in dict.fromkeys(root for root, _, _ in inside):
        if not part.startswith(f"{root}."):
            yield f"{root}."
            continue
        layers = dict.fromkeys(layer for one, layer, _ in inside if one == root)
        if globs:
            yield f"{root}.*."
        yield from (f"{root}.{'0' if layer == '*' and not globs else layer}." for layer in layers
                    if not (globs and layer == "*"))  # fmt: skip


def layer_numbers(word: str, line: Sequence[str]) -> Iterator[str]:
    """Numbers of layers behind a list or range that has begun, `0,3-`."""
    before = word[: max(word.rfind(","), word.rfind("-")) + 1]
    names = _tensors(line)["activation"]
    numbers = {int(found[2]) for name in names
               if (found := _LAYER.match(name)) and found[2].isdigit()}  # fmt: skip
    yield from (f"{before}{number}" for number in sorted(numbers))


def model_names(*, local: bool = False, owned: bool = False) -> Iterator[str]:
    """Models of the catalog and in the caches.

    `local`: that are on this machine; `owned`: that are in a cache, not in the package.
    """
    from llmcli.checkpoints.cache.inventory import Inventory

    for stored in Inventory.read().stored():
        fetched = stored.model.state != "not fetched"
        if not local or (fetched and not (owned and stored.model.place == "package")):
            yield stored.model.name


def _model_of(line: Sequence[str]) -> str | None:
    """The model that a command line names, else the environment or the configuration file."""
    from llmcli.cli.tree import Root
    from llmcli.shell.configuration import read

    if not (named := os.environ.get("LLMCLI_MODEL")):
        keys = {one.name: str(one.value) for one in read(Root.configured).keys(line[0])}
        named = keys.get("model")
    for word, following in pairwise((*line, "")):
        name, _, value = word.partition("=")
        if name in ("-m", "--model"):
            named = value or following
    return None if named is None else named.strip("\"'")


def _path(spec: str | None) -> Path | None:
    """The model's path, None if it is not on this machine. Marks nothing as used."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.checkpoints.locate import DEFAULT_MODEL
    from llmcli.checkpoints.names import HubId, parse

    found: Path | HubId | str = parse(os.path.expanduser(spec or DEFAULT_MODEL))
    if isinstance(found, str):
        entry = CATALOG[found]
        if entry.hub_id is None:
            return entry.file if entry.is_cached() else None
        found = entry.hub_id
    if isinstance(found, HubId):
        found = _snapshot(found)
    return found if found.exists() else None


def _snapshot(model: HubId) -> Path:
    """Where a model of the hub's cache would be: without the library, which takes 0.2 s."""
    from llmcli.checkpoints.cache.hub import PREFIX, hub_cache

    place = hub_cache() / (PREFIX + model.repository.replace("/", "--"))
    revision = model.revision or "main"
    reference = place / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    return place / "snapshots" / commit / (model.file or "")


def _tensors(line: Sequence[str]) -> Tensors:
    """The names of a model's tensors by kind; without a model, of any model's."""
    from llmcli import __version__
    from llmcli.checkpoints.catalog import cache_dir

    try:
        path = _path(_model_of(line))
    except (LlmcliError, OSError, ValueError, KeyError):  # such as half of a name
        path = None
    key = f"{__version__} {_stamp(path)}"
    place = cache_dir() / "completion" / f"{sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
        return {kind: list(kept[kind]) for kind in KINDS["names"]}
    except (OSError, ValueError, KeyError, TypeError):
        found = _read(path)
    with suppress(OSError, LlmcliError):  # a cache that cannot be written to only makes it slower
        _keep(place, found)
    return found


def _stamp(path: Path | None) -> str:
    """Another text where the file is another one; of a directory its configuration is."""
    if path is None:
        return "any"
    file = path / "config.json" if path.is_dir() and (path / "config.json").exists() else path
    status = file.stat()
    return f"{os.path.abspath(file)} {status.st_size} {status.st_mtime_ns}"


def _read(path: Path | None) -> Tensors:
    """From the headers, or the vocabulary of all parts where there are none that can be read."""
    if path is not None:
        try:
            from llmcli.anatomy.graph import graph
            from llmcli.checkpoints.checkpoint import open_checkpoint
            from llmcli.families import describe

            model = graph(describe(open_checkpoint(path, name=path.name)))
        except (LlmcliError, OSError):
            pass
        else:
            return {
                "activation": list(model.nodes),
                "state": list(model.states),
                "parameter": list(model.parameters),
            }
    from llmcli.cli.vocabulary import vocabulary

    return {kind: list(names) for kind, names in vocabulary().items()}


def _keep(place: Path, found: Tensors) -> None:
    """Writes a file of names, whole or not at all, and removes the oldest of too many."""
    from llmcli.shell.files import whole_file

    place.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(str(place)) as file:
        file.write(json.dumps(found).encode())
    others = sorted(place.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for old in others[:-_MOST]:
        old.unlink(missing_ok=True)
