"""`llmcli _complete SHELL WORD…`: what may stand for the last word of a command line. No torch.

The scripts in `assets/completions` run this on TAB. The first line of the output says what the
shell does with a candidate (`words`: a space follows it; `part`: none does, it is to be continued;
`files`: it is a path); fish gets no such line. Each further line is a candidate, with its
description behind a `:` for zsh and behind a tab for fish. On an error nothing is printed.

The names of models and tensors are read from headers and from the names of cached files; the
network is never used. What a model has is kept in `completion/` of llmcli's cache until its file
changes: finding it takes 0.2 s, reading it 1 ms.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import LlmcliError

if TYPE_CHECKING:
    from llmcli.checkpoints.names import HubId

# endings of the files of a command's option, by (command, option), beside `FILES` of its module
ENDINGS = {
    ("ladder", "save"): ("json",),
    ("timing", "trace"): ("json",),
    ("chat", "save"): ("json",),
}
WEIGHTS = ("gguf", "safetensors")  # endings of a model that is one file
CONTINUED = (".", "[", "/")  # a candidate that ends so is to be continued
TENSOR_KINDS = {
    "names": ("activation", "state", "parameter"),
    "tensor": ("activation", "parameter"),
    "weights": ("parameter",),
    "edit": ("activation",),
}
_LAYER = re.compile(r"(blocks|cache)\.([^.]*)\.")
_MOST_KEPT = 64  # files of names that are kept
Tensors = dict[str, list[str]]  # kind → names
Found = tuple[str, Iterable[str]]  # `words`, `list`, `files` or `paths` (of any ending), and which


def answer(argv: Sequence[str]) -> None:
    """Prints the candidates for the last of the words `argv[1:]`. Never raises."""
    try:
        shell, *words = argv
        sys.stdout.write("".join(f"{line}\n" for line in lines(shell, words)))
        sys.stdout.flush()
    except Exception:  # no error belongs in a prompt
        return


def lines(shell: str, words: Sequence[str]) -> Iterator[str]:
    """The answer for a shell (`bash`, `zsh`, `fish`), line by line."""
    line, word, before, cut = split_words(words, bash=shell == "bash")
    kind, found = candidates(line, word)
    described = found if isinstance(found, Mapping) else dict.fromkeys(found, "")
    fit = {
        f"{before}{value[cut:]}": text
        for value, text in described.items()
        if value.startswith((word, f"./{word}"))  # a folder where a model is named
    }
    end = "part" if kind == "list" or any(one.endswith(CONTINUED) for one in fit) else "words"
    if shell == "bash":
        yield "files" if kind in ("files", "paths") else end
        yield from (value.rstrip("/") for value in fit)
    elif shell == "zsh":
        yield "files" if kind == "paths" else end
        for value, text in fit.items():
            escaped = value.replace("\\", "\\\\").replace(":", "\\:")
            yield f"{escaped}:{text}" if text else escaped
    else:
        yield from (f"{value}\t{text}".rstrip("\t") for value, text in fit.items())


def split_words(words: Sequence[str], *, bash: bool) -> tuple[list[str], str, str, int]:
    """The words between the program and the last one; the last word; its prefix; its cut.

    In `--dtype=float3` the value is the last word, and candidates get the prefix `--dtype=`. bash
    splits words at `=`, and at the colon of `hf:org/name`: they are joined again, and of a
    candidate the characters up to the colon (the cut) are not repeated.
    """
    joined: list[str] = []
    for one in words[1:]:
        if bash and joined and (one == ":" or joined[-1].endswith(":")):
            joined[-1] += one
        else:
            joined.append(one)
    if bash and joined[-1] == "=":
        joined.append("")
    *line, word = (one for one in joined if one != "=" or not bash)
    word = word.lstrip("\"'")
    name, sign, value = word.partition("=")
    if sign and name.startswith("-"):
        return [*line, name], value, f"{name}=", 0
    return line, word, "", word.rfind(":") + 1 if words[-1] not in joined[-1:] else 0


def candidates(line: Sequence[str], word: str) -> Found:
    """What may follow the words of `line`; not all of it need begin with `word`."""
    from llmcli.cli.tree import root

    top: Any = root()
    context: Any = top.make_context("llmcli", [], resilient_parsing=True)
    at = next((n for n, one in enumerate(line) if one in top.entries), None)
    if at is None:
        if word.startswith("-"):
            return "words", _options(top, context, line)
        return "words", {name: entry.summary for name, entry in top.entries.items()}
    name, after = top.named(line[at:])
    nested = {one: entry for one, entry in top.nested.items() if one.split()[0] == name}
    command = top.get_command(context, name)
    inner = command.make_context(name, [], parent=context, resilient_parsing=True)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    valued = {
        spelled: option
        for option in command.get_params(inner)
        if option.param_type_name == "option" and not option.is_flag
        for spelled in (*option.opts, *option.aliases)
    }
    if after and (option := valued.get(after[-1])):
        return _values(name, option, word, line)
    if word.startswith("-"):
        return "words", _options(command, inner, after)
    before = sum(
        not one.startswith("-") and previous not in valued
        for previous, one in zip(("", *after), after, strict=False)
    )
    if nested and not after:
        return "words", {one.split()[1]: entry.summary for one, entry in nested.items()}
    if arguments and (before < len(arguments) or arguments[-1].nargs < 0):
        return _arguments(name, arguments[min(before, len(arguments) - 1)], word, line, before)
    return "words", ()


def _options(command: Any, context: Any, line: Sequence[str]) -> dict[str, str]:
    """The names of the options that are listed, and can be given once more, with their help."""
    from llmcli.shell.configuration import listed

    return {
        name: _first_sentence(option.help or "")
        for option in listed(command.get_params(context))
        if option.multiple or set(line).isdisjoint(option.opts)
        for name in sorted(option.opts, key=len)
    }


def _first_sentence(text: str) -> str:
    """The help's first sentence, without the default; what is in parentheses is not cut."""
    text = re.sub(r"\s*\[default[^]]*\]", "", text)
    return re.split(r"(?<=[a-z)])[.;:] (?![^(]*\))", text)[0].rstrip(".")


def _arguments(command: str, argument: Any, word: str, line: Sequence[str], before: int) -> Found:
    """What an argument can be; there are `before` others before it."""
    from llmcli.cli.help import TOPICS
    from llmcli.cli.tree import ENTRIES

    if command in ("models rm", "models path"):
        return "words", model_names(local=True, owned=command == "models rm")
    if command == "help":
        return "words", () if before else (*TOPICS, *ENTRIES)
    if argument.metavar == "[NAME[INDEX]]":
        return "words", tensor_names("tensor", word, line)
    if argument.metavar in ("A", "B"):
        return "paths", _files(word)
    if argument.metavar in ("[A]", "[B]"):
        return _models(word)
    if argument.metavar == "NAME...":
        from llmcli.checkpoints.catalog import CATALOG

        return "words", CATALOG
    return "words", ()


def _models(word: str, others: Sequence[str] = ()) -> Found:
    """The names and files of models, after other words."""
    from llmcli.checkpoints.catalog import CATALOG

    names = chain(others, CATALOG, model_names())
    return "files", chain(names, _files(word, WEIGHTS, model=True))


def _values(command: str, option: Any, word: str, line: Sequence[str]) -> Found:
    """What the value of an option can be."""
    metavar, name = str(option.metavar or ""), str(option.name)
    if name in ("model", "draft"):
        return _models(word, ("ngram",) * ("ngram" in metavar))
    if name == "device":
        joint = {"selftest": "", "bench": "/"}.get(command, ",")  # of devices that share layers
        first = word[: word.rfind(joint) + 1] if joint else ""
        lists = [f"{first or f'cuda{joint}'}cpu"] if joint else []
        return "words", ("auto", "cpu", "cuda", *lists, "mps")
    if name in ("map", "metrics"):
        from llmcli.records.attention import METRICS

        metrics = [metric.name for metric in METRICS]
        if name == "map":
            return "words", metrics
        before = word[: word.rfind(",") + 1]
        return "list", (f"{before}{one}" for one in ("all", *metrics))
    if name in ("name", "filter"):
        return "words", tensor_names("weights" if command == "load" else "names", word, line)
    if name == "edit":
        return "list", tensor_names(name, word, line)
    if name == "layer":
        return "words", layer_numbers(word, line)
    if name == "rung":
        return "words", sys.modules["llmcli.commands.ladder.command"].NAMES
    if choices := option.conversion.choices:
        return "words", choices
    if metavar.startswith(("FILE", "PATH")):
        module = sys.modules[f"llmcli.commands.{command.split()[0]}.command"]
        own = getattr(module, "FILES", ()) if "--output" in option.opts else ()
        endings = ENDINGS.get((command, name), own) if metavar.startswith("FILE") else ()
        return ("files", _outputs(command, word, endings)) if endings else ("paths", _files(word))
    return "words", [one for one in metavar.split("|") if not one.isupper()] * ("|" in metavar)


def _outputs(command: str, word: str, endings: Sequence[str]) -> Iterator[str]:
    """Files to write: `word`, or the command's name, with each ending; then existing files."""
    folder, name = os.path.split(word)
    stem = os.path.join(folder, os.path.splitext(name)[0] or command.split()[0])
    yield from (f"{stem}.{ending}" for ending in endings)
    yield from _files(word, endings)


def _files(word: str, endings: Sequence[str] = (), *, model: bool = False) -> Iterator[str]:
    """Paths that begin with `word`: folders, which end in `/`, and files with these endings.

    For a `model` a folder is written `./name`: its bare name would not be taken for a path.
    """
    start = os.path.basename(word)
    folder = word[: len(word) - len(start)]
    here = "./" if model and not word.startswith((".", "/", "~")) and not folder else folder
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda one: one.name)
    except OSError:  # there is no such folder
        return
    for entry in entries:
        if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
            if entry.is_dir():
                yield f"{here}{entry.name}/"
            elif not endings or entry.name.endswith(tuple(f".{one}" for one in endings)):
                yield f"{folder}{entry.name}"


def tensor_names(kind: str, word: str, line: Sequence[str]) -> Iterator[str]:
    """Names and patterns of tensors behind the last comma of `word`; `tensor`: the name of one.

    `kind` is one of `TENSOR_KINDS`, `line` the words before, which may name the model.
    """
    found, globs = _tensors(line), kind != "tensor"
    head, comma, part = word.rpartition(",") if globs else ("", "", word)
    names = [name for one in TENSOR_KINDS[kind] for name in found[one]]
    return (f"{head}{comma}{name}" for name in _tensor_candidates(part, names, globs=globs))


def _tensor_candidates(part: str, names: Sequence[str], *, globs: bool) -> Iterator[str]:
    """Names from the left: those outside of layers, which layers there are, what is in one."""
    end = "" if globs else "["
    typed = _LAYER.match(part)
    inside = [
        (found[1], found[2], name[found.end() :]) for name in names if (found := _LAYER.match(name))
    ]
    if typed:
        rests = dict.fromkeys(
            rest
            for root, layer, rest in inside
            if root == typed[1] and (layer == typed[2] or not typed[2].isdigit() or layer == "*")
        )
        yield from (f"{typed[0]}{rest}{end}" for rest in rests)
        return
    yield from (f"{name}{end}" for name in names if not _LAYER.match(name))
    for root in dict.fromkeys(root for root, _, _ in inside):
        if not part.startswith(f"{root}."):
            yield f"{root}."
            continue
        layers = dict.fromkeys(layer for one, layer, _ in inside if one == root)
        if globs:
            layers = {"*": None, **layers}
        elif "*" in layers:
            layers = {"0" if layer == "*" else layer: None for layer in layers}
        yield from (f"{root}.{layer}." for layer in layers)


def layer_numbers(word: str, line: Sequence[str]) -> Iterator[str]:
    """Numbers of layers behind a list or range that has begun, `0,3-`."""
    before = word[: max(word.rfind(","), word.rfind("-")) + 1]
    names = _tensors(line)["activation"]
    numbers = {
        int(found[2]) for name in names if (found := _LAYER.match(name)) and found[2].isdigit()
    }
    yield from (f"{before}{number}" for number in sorted(numbers))


def model_names(*, local: bool = False, owned: bool = False) -> Iterator[str]:
    """Models of the catalog and in the caches.

    `local`: that are on this machine; `owned`: that are in a cache, not in the package.
    """
    from llmcli.checkpoints.cache import Inventory

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


def _model_path(spec: str | None) -> Path | None:
    """The model's path, None if it is not on this machine. Marks nothing as used."""
    from llmcli.checkpoints.catalog import CatalogEntry, named
    from llmcli.checkpoints.locate import DEFAULT_MODEL
    from llmcli.checkpoints.names import HubId

    found = named(os.path.expanduser(spec or DEFAULT_MODEL))
    if isinstance(found, CatalogEntry):
        return found.file if found.is_cached() else None
    path = _snapshot(found) if isinstance(found, HubId) else found
    return path if isinstance(path, Path) and path.exists() else None


def _snapshot(model: HubId) -> Path:
    """Where a model of the hub's cache would be: without the library, which takes 0.2 s."""
    from llmcli.checkpoints.hub.library import folder_of

    place = folder_of(model)
    revision = model.revision or "main"
    reference = place / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    return place / "snapshots" / commit / (model.file or "")


def _tensors(line: Sequence[str]) -> Tensors:
    """The names of a model's tensors by kind; without a model, of any model's."""
    from llmcli import __version__
    from llmcli.checkpoints.catalog import cache_dir

    try:
        path = _model_path(_model_of(line))
    except (LlmcliError, OSError, ValueError, KeyError):  # such as half of a name
        path = None
    key = f"{__version__} {_model_stamp(path)}"
    place = cache_dir() / "completion" / f"{sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
        return {kind: list(kept[kind]) for kind in TENSOR_KINDS["names"]}
    except (OSError, ValueError, KeyError, TypeError):
        found = _read_tensors(path)
    with suppress(OSError, LlmcliError):  # a cache that cannot be written to only makes it slower
        _keep_tensors(place, found)
    return found


def _model_stamp(path: Path | None) -> str:
    """Another text where the file is another one; of a directory its configuration is."""
    if path is None:
        return "any"
    file = path / "config.json" if path.is_dir() and (path / "config.json").exists() else path
    status = file.stat()
    return f"{os.path.abspath(file)} {status.st_size} {status.st_mtime_ns}"


def _read_tensors(path: Path | None) -> Tensors:
    """From the headers, or the vocabulary of all parts where there are none that can be read."""
    if path is not None:
        try:
            from llmcli.checkpoints.checkpoint import open_checkpoint
            from llmcli.families import describe
            from llmcli.graph.graph import graph

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


def _keep_tensors(place: Path, found: Tensors) -> None:
    """Writes a file of names, whole or not at all, and removes the oldest of too many."""
    from llmcli.shell.files import whole_file

    place.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(str(place)) as file:
        file.write(json.dumps(found).encode())
    others = sorted(place.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for old in others[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)
