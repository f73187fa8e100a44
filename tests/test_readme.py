"""What README.md and the help topics say is there, is there."""

import ast
import re
import shlex
import sys
from pathlib import Path

import children
import pytest

from llmcli.checkpoints import CATALOG
from llmcli.cli.help import TOPICS
from llmcli.cli.tree import ENTRIES, NESTED, root
from llmcli.cli.vocabulary import READ, TABLES, vocabulary
from llmcli.commands.attention.measure.summaries import FEWEST
from llmcli.config.formats import PACKED
from llmcli.engine.sampling import Sampling
from llmcli.errors import LlmcliError
from llmcli.kernels import native
from llmcli.ops.quant import DECODERS, PLAIN
from llmcli.records.attention import LABELS, METRICS, MOST_RANKED
from llmcli.records.ranges import SAMPLING
from llmcli.shell.exits import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {"README": README, **{name: topic.text() for name, topic in TOPICS.items()}}
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
SAMPLE = re.compile(r"^```console\n\$ llmcli ([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def missing(text):
    """Tests that `text` names and that do not exist."""
    for file, name in NAMED.findall(text):
        path = ROOT / file
        if not path.is_file():
            yield file
        elif name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            if name not in functions:
                yield f"{file}::{name}"


def rows(text, head):
    """The cells of the rows of the table whose head begins with that cell."""
    start = text.index(f"| {head} |")
    lines = text[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_it_is_short_and_names_every_topic():
    assert len(README.splitlines()) <= 300
    assert [cells[0].strip("`") for cells in rows(README, "topic")] == list(TOPICS)


def test_every_format_has_a_test():
    found = rows(TEXTS["formats"], "file")
    assert len(found) > 10
    assert [row for row in found if not NAMED.search(row[-1])] == []


def test_the_weight_formats_are_those_that_are_read():
    gguf = {name for name in (*DECODERS, *PLAIN) if not re.match(r"F8|I\d", name)}
    assert set(READ) == gguf
    told = {
        word
        for file, kinds in rows(TEXTS["formats"], "file")
        if file.startswith("GGUF")
        for word in re.findall(r"\b[A-Z]+\d[\w]*\b|\bMXFP4\b|\bNVFP4\b", kinds.split("<!--")[0])
    }
    assert told == gguf
    table = {name: how for name, _, _, how in rows(TABLES["gguf-types"](), "format")}
    assert {name for name, how in table.items() if how == "packed"} == set(PACKED)
    levels = re.search(r"LLMCLI_KERNELS=([\w|]+)", TEXTS["formats"])[1].split("|")
    assert set(levels) == {"off", *native.LEVELS}


def test_the_catalog_is_told_as_it_is():
    told = rows(TABLES["catalog"](), "name")
    assert [cells[0].strip("`") for cells in told] == list(CATALOG)
    for (_, model, purpose), entry in zip(told, CATALOG.values(), strict=True):
        assert entry.summary.startswith(model)
        assert purpose == f"{entry.purpose} · {entry.license}"


def test_sampling_is_told_as_it_is():
    """Ranges and defaults of the options, and what the range means."""
    told = {cells[0]: cells for cells in rows(TEXTS["sampling"], "option")}
    defaults = Sampling()
    for name, limits in SAMPLING.items():
        cells = next(c for head, c in told.items() if f"--{name.replace('_', '-')}`" in head)
        assert float(cells[2]) == getattr(defaults, name)
        said = {
            "> 0": (0, None, True), "≥ 0": (0, None, False), "(0, 1]": (0, 1, True),
            "[0, 1]": (0, 1, False),
        }.get(cells[1])
        assert said is None or said == (limits.low, limits.high, limits.above)
        assert said is not None or cells[1] == "any"
    assert len(told) == len(SAMPLING)


def test_exit_codes_are_those_of_the_errors():
    told = {int(cells[0]) for cells in rows(TEXTS["settings"], "code")}
    kinds = [LlmcliError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.code for kind in kinds if isinstance(kind.code, int)} <= told
    assert told == {0, 1, 2, 3, 4, 5, 6, 7, 130, 143}
    assert run.__module__ == "llmcli.shell.exits"


def test_kinds_of_heads_are_told_as_they_are():
    told = {kind: where for kind, _, where in rows(TEXTS["attention"], "kind")}
    assert told == {one.name: f"`{one.metric}` ≥ {one.threshold:g}" for one in LABELS}
    assert f"at least {FEWEST} rows" in TEXTS["attention"]
    assert f"{MOST_RANKED:,} tokens" in TEXTS["attention"]


def test_metrics_and_names_come_from_the_code():
    assert [cells[0].strip("`") for cells in rows(TABLES["metrics"](), "metric")] == [
        metric.name for metric in METRICS
    ]
    listed = TABLES["activations"]()
    for name in vocabulary()["activation"]:
        part, _, leaf = name.rpartition(".")
        assert f"`{name}`" in listed or (f"`{part}`" in listed and f"`{leaf}`" in listed)


@pytest.mark.parametrize("name", list(TEXTS))
def test_the_tests_that_it_names_are_there(name):
    assert list(missing(TEXTS[name])) == []


def test_a_test_that_is_not_there_is_missed():
    assert list(missing("`tests/test_readme.py::test_of_nothing` and `tests/gone.py`")) == [
        "tests/test_readme.py::test_of_nothing", "tests/gone.py",
    ]  # fmt: skip


def test_benchmarks_that_are_named_exist():
    for text in TEXTS.values():
        for name in re.findall(r"`(?:python tests/benchmarks/)?(\w+\.py)`", text):
            places = [ROOT / "tests" / "benchmarks", ROOT / "llmcli"]
            assert any((place / name).is_file() for place in places), name


def commands(text):
    """Command lines of its code blocks: words behind `llmcli`."""
    for block in CODE.findall(text):
        for line in block.splitlines():
            found = re.match(r"(?:\$ |echo .* \| |LLMCLI_\w+=\S* )?llmcli (.*)$", line)
            if found:
                yield shlex.split(found[1], comments=True)
    for inline in re.findall(r"`llmcli ([a-z][^`]*)`", text):
        yield shlex.split(" ".join(inline.split()))


@pytest.mark.parametrize("name", list(TEXTS))
def test_its_command_lines_can_be_read(name):
    """Every option in them exists and takes such a value. Placeholders in capitals are skipped."""
    lines = [w for w in commands(TEXTS[name]) if w and w[0] not in ("COMMAND", "TOPIC")]
    assert lines or name in ("safety",)
    top = root()
    context = top.make_context("llmcli", [], resilient_parsing=True)
    for words in lines:
        if words[0].startswith("--") or words[-1] == "--help":
            continue
        both = " ".join(words[:2])
        command = both if both in NESTED else words[0]
        assert command in {*ENTRIES, *NESTED, "help"}, words
        top.get_command(context, command).make_context(
            command, words[len(command.split()) :], parent=context
        )


@pytest.mark.parametrize("name", list(TOPICS))
def test_code_fits_a_terminal(name):
    """Of 80 columns, in which it is indented by four; long command lines can be pasted."""
    for block in CODE.findall(TEXTS[name]):
        for line in block.splitlines():
            assert len(line) <= 76 or "#" not in line, line


def alike(line):
    """A line without what differs from machine to machine: numbers, their units, bars, widths."""
    line = re.sub(r"[░▒▓█]", " ", line)
    line = re.sub(r"<?[−-]?[\d.,]*\d(e[−-]?\d+)?", "0", line)
    line = re.sub(r"0 (ns|µs|ms|s)\b", "0 s", line)
    line = re.sub(r"0 ([kKMGT]i?)?B\b", "0 B", line)
    line = re.sub(r"\b(memory|compute|calls|kernel|L0) 0 %", "bound 0 %", line)
    line = re.sub(r"most in \w+", "most in a part", line)
    return re.sub(r"[─-]{3,}", "─", " ".join(line.split()))


def printed(sample, lines):
    """Whether a sample is what a command prints: `…` stands for any lines, none among them."""
    at, skips = 0, False
    for part in re.split(r"^…\n", sample, flags=re.MULTILINE):
        wanted = [alike(line) for line in part.splitlines()]
        places = range(at, len(lines) - len(wanted) + 1) if skips else [at]
        found = next((one for one in places if lines[one : one + len(wanted)] == wanted), None)
        assert found is not None, f"{part}\nis not among\n" + "\n".join(lines[at:])
        at, skips = found + len(wanted), True
    assert sample.endswith("…\n") or at == len(lines), "\n".join(lines[at:])


@pytest.mark.real
@pytest.mark.skipif(native.level() is None, reason="they are of packed weights: no kernels here")
@pytest.mark.parametrize("line", [command for command, _ in SAMPLE.findall(README)])
def test_its_samples_are_what_the_commands_print(line, smollm2_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200" if line.startswith("shapes") else "120")
    few = {"512": "16", "128": "4"}  # tokens: it is what is printed that is tested, not how fast
    words = [few.get(word, word) for word in shlex.split(line)]
    words += ["--pairs", "2"] if words[0] == "timing" else []
    argv = [sys.executable, "-m", "llmcli", *words]
    ended = children.run(argv, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    printed(dict(SAMPLE.findall(README))[line], [alike(one) for one in ended.stdout.splitlines()])


@pytest.mark.parametrize(
    "sample", ["a 1\nc\n", "a 1\n…\nb\nd\n…\n", "…\nc\n", "a\n…\n", "a 1\nb\nc\n…\nd\ne\n"]
)
def test_a_sample_that_is_not_printed_is_seen(sample):
    lines = ["a 0", "b", "c", "d"]
    printed("a 2\n…\nc\nd\n", lines)
    printed("…\nb\nc\n…\n", lines)
    with pytest.raises(AssertionError):
        printed(sample, lines)
