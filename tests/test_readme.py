"""What README.md says is there, is there."""

import ast
import re
from pathlib import Path

from llmcli.checkpoints import CATALOG

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


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


def rows(table):
    """The rows of the table whose head begins with that cell."""
    start = README.index(f"| {table} |")
    return README[start:].split("\n\n")[0].splitlines()[2:]


def test_every_format_has_a_test():
    found = rows("what is read")
    assert len(found) > 10
    assert [row for row in found if not NAMED.search(row)] == []


def test_the_catalog_is_told_as_it_is():
    told = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows("name | model")]
    assert [cells[0].strip("`") for cells in told] == list(CATALOG)
    for (_, model, download, license, _), entry in zip(told, CATALOG.values(), strict=True):
        assert license == entry.license
        if model != "the same, bfloat16":
            assert entry.summary.startswith(f"{model}, ")
        assert download == "–" or f", {download}, from the hub" in entry.summary


def test_the_tests_that_it_names_are_there():
    assert list(missing(README)) == []
    assert list(missing("`tests/test_readme.py::test_of_nothing` and `tests/gone.py`")) == [
        "tests/test_readme.py::test_of_nothing", "tests/gone.py",
    ]  # fmt: skip
