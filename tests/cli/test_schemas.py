"""Every JSON document of every command is what the schema says that ships with the package.

The schemas are in `llmcli/assets/schemas`, one for each name in a document's `schema`:
`llmcli.lens/1` is `lens.1.json`.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from cli_tiny import write_mixture, write_tiny
from hub_cache_files import OLD, write_revision
from json_schemas import REGISTRY, SCHEMAS, errors, valid
from jsonschema import Draft202012Validator
from schema_types import FOLDER, schemas

from llmcli.cli.tree import ENTRIES, NESTED, root
from llmcli.commands.selftest.measure import arithmetic, run

DATA = Path(__file__).parents[1] / "data"
TEXT = ["hello there"]
# Command lines and exit codes that are not 0, then those that end in an error. Words for models
# stand for what `models` makes; every other word is the user's own.
RUNS, WRONG = (
    {
        name: (shlex.split(line), int(code or 0))
        for name, line, code in re.findall(r"(?m)^(.*?): (.*?)(?: → (\d))?$", part)
    }
    for part in Path(__file__).with_name("schema-runs.txt").read_text("utf-8").split("\n\n")
)

# keys that a document may go without, and objects whose keys are names of things
OPTIONAL = {"pattern", "scores", "logprobs", "index"}
NAMED = {"metadata", "metrics", "rows", "origins", "skipped", "unlabelled", "checks",
         "settings"}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """CHAT has weights and a template, BARE no tokenizer, LONE is a file by itself.

    MIXTURE has experts, and no weights. BEFORE and AFTER are results of a benchmark which differ
    in everything that may. LONG is a text that does not fit.
    """
    folder = tmp_path_factory.mktemp("schemas")
    whole = write_tiny(folder / "chat", weights=True)
    bare, lone = folder / "bare", folder / "lone.safetensors"
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copy(whole / "model.safetensors", lone)
    write_revision(folder / "hub", "org/name", {"config.json": b"{}", "model.safetensors": b"x"})
    old = {"model.safetensors": b"old"}
    write_revision(folder / "hub", "org/name", old, commit=OLD, refs=[])
    rows = json.loads((DATA / "llama_bench" / "results.json").read_text())
    other = rows[0] | {"n_threads": 9}
    failed, short = rows[1] | {"error": "no", "samples_ns": []}, {"n_gen": 3, "samples_ns": [1e9]}
    later = [rows[0], failed, *rows[2:], other, rows[2] | short]
    before, after = folder / "before.json", folder / "after.json"
    before.write_text(json.dumps([other, *rows]))
    after.write_text(json.dumps([row | {"type_k": "q8_0", "dtype": "x"} for row in later]))
    return {
        "CHAT": str(whole), "BARE": str(bare), "LONE": str(lone), "HUB": str(folder / "hub"),
        "BEFORE": str(before), "AFTER": str(after),
        "MIXTURE": str(write_mixture(folder / "mixture")), "LONG": "a" * 3000,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def made_up(models, monkeypatch):
    """A hub's cache with a model and what a newer commit replaced; and a brief selftest.

    That is of few models, and without processes of its own.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", models["HUB"])
    few = {name: arithmetic.MODELS[name] for name in ("llama", "gpt2")}
    monkeypatch.setattr(arithmetic, "MODELS", few)
    monkeypatch.setattr(run, "measure_levels", lambda: None)
    monkeypatch.setattr(run, "measure_exhaustion", lambda device: run.measure_groups(device)[0])


@pytest.fixture
def document(cli, models):
    """Runs a command with --json, on `tiny` where it names no model; what stdout says."""

    def run(argv, code=0):
        words = [models.get(word, word) for word in argv]
        needs = schema_of(words) in ENTRIES and words[0] != "selftest"
        if "-m" not in words and needs and "--families" not in words:
            words += ["-m", "tiny"]
        result = cli(*words, "--json")
        assert result.code == code, result.err
        return result.json()

    return run


def schema_of(argv):
    """`bench-compare` for that command of two words; `models` alone is `models list`."""
    both = " ".join(["models", "list"] if argv == ["models"] else argv[:2])
    return both.replace(" ", "-") if both in NESTED else argv[0]


def test_the_files_are_what_the_types_of_reports_give():
    """`python tests/schema_types.py` writes them."""
    for name, text in schemas().items():
        assert (FOLDER / name).read_text("utf-8") == text, name


# of whose documents each key is left out, and given another type
SHORT = (
    "shapes", "shapes names", "shapes of a file", "attention pairs, generate",
    "attention of one token", "experts", "lens", "dump parameter", "load", "load check of a file",
    "info", "info of a file", "info families",
    "generate", "score", "diff", "diff weights", "tokens", "env", "ladder", "explain", "timing",
    "models", "models pull", "models pull, in part", "models path", "models rm", "models prune",
    "bench compare, slower",
)  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_what_a_command_prints(name, document):
    said, command = document(*RUNS[name]), schema_of(RUNS[name][0])
    assert errors(said, command) == []
    if name in SHORT:
        assert not_refused(shortened(said), command) == []
    if name == "bench compare, slower":
        assert all(said[key] for key in ("differences", "unsaid", "tests", "lone"))
    if name == "score":  # new keys may come
        more = said | {"new": 1, "model": said["model"] | {"new": None}}
        more["tokens"] = [token | {"new": []} for token in said["tokens"]]
        assert errors(more, command) == []


@pytest.mark.parametrize(("argv", "code"), WRONG.values(), ids=WRONG.keys())
def test_an_error(argv, code, document):
    said = document(argv, code)
    assert errors(said, "error") == []
    assert said["error"]["code"] == code
    assert not_refused(said, "error") == []


def members(value, path=("",), typed=True):
    """Every object with each of its keys: where, whether it has to be there, and has a type."""
    if isinstance(value, dict):
        for key, item in value.items():
            required = path[-1] not in NAMED and key not in OPTIONAL
            yield value, key, (*path, *value), required, typed
            yield from members(item, (*path, key), typed and key != "metadata")
    elif isinstance(value, list):
        for item in value:
            yield from members(item, (*path, ""), typed)


def shortened(value, most=2):
    """Two entries of a list say as much as all, and within them one; pairs stay pairs."""
    if isinstance(value, dict):
        return {key: shortened(item, most) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    return [shortened(item, 1) for item in (value if len(value) == 2 else value[:most])]


def not_refused(said, command):
    """Keys of a valid document that its schema does not miss, or takes with another type.

    Of objects at one place that have the same keys and types the first one is asked.
    """
    assert errors(said, command) == []
    missed, asked = [], set()
    for owner, key, place, required, typed in list(members(said)):
        value = owner[key]
        if (one := (place, key, type(value))) in asked:
            continue
        asked.add(one)
        del owner[key]
        if required and valid(said, command):
            missed.append(("without", key))
        owner[key] = {"wrong": 1} if isinstance(value, list | type(None)) else [[value]]
        if typed and valid(said, command):
            missed.append(("mistyped", key))
        owner[key] = value
    return missed


@pytest.mark.parametrize(("argv", "file"), [
    (["attention", *TEXT, "-o"], "heads.json"),
    (["experts", "-m", "MIXTURE", "--random-weights", *TEXT, "-o"], "experts.json"),
    (["lens", *TEXT, "--mid", "-o"], "lens.json"),
    (["ladder", "hello", "--rung", "6", "-n", "1", "-o"], "climb.json"),
    (["dump", *TEXT, "--name", "embed", "-o"], "embed.npz"),
])
def test_files(argv, file, document, tmp_path):
    path = tmp_path / file
    said = document([*argv, str(path)])
    assert errors(said, argv[0]) == []
    if path.suffix == ".json":
        assert errors(json.loads(path.read_text("utf-8")), argv[0]) == []
    else:
        assert said["file"] == {"path": str(path), "bytes": path.stat().st_size}


# the files themselves


def test_every_command_that_prints_json_has_itsschema_of():
    names = set()
    with root().make_context("llmcli", ["env"]) as context:
        for name in (*ENTRIES, *NESTED):
            command = context.command.get_command(context, name)
            if any("--json" in parameter.opts for parameter in command.params):
                names.add(name)
    assert names == {*ENTRIES, *NESTED}
    names = {name.replace(" ", "-") for name in names - {"models"}}
    assert set(SCHEMAS) == {f"{name}.1.json" for name in (*names, "error", "common")}
    assert {schema_of(argv) for argv, _ in RUNS.values()} == names


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_needs_no_network(name):
    schema = SCHEMAS[name]
    Draft202012Validator.check_schema(schema)
    assert name == "common.1.json" or schema["properties"]["schema"]["const"] == (
        f"llmcli.{name.removesuffix('.1.json')}/1"
    )
    resolver = REGISTRY.resolver(base_uri=name)
    for reference in references(schema):
        assert reference.startswith(("#/$defs/", "common.1.json#/$defs/"))
        resolver.lookup(reference)


def references(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)
