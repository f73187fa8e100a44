"""The size and shape of the package, folder by folder: `python tests/mass.py [REVISION]`.

Lines and files; functions, and those of one statement; dataclasses; `# fmt: skip`; imports that run
upwards (from a folder to one that lies above it) and pairs of folders that import each other.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import children
from test_imports import LAYER

ROOT = Path(__file__).parents[1]
# from below to above; folders of one level do not lie above each other
LEVEL = {**LAYER, "ui": LAYER["measure"], "commands": LAYER["command"]}
COLUMNS = ("lines", "files", "functions", "of one statement", "dataclasses", "fmt: skip", "upwards")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(revision: str | None) -> dict[str, str]:
    """The text of every module of the package by path, of a revision or as it lies here."""
    if revision is None:
        files = sorted((ROOT / "llmcli").rglob("*.py"))
        return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}

    def git(*words: str) -> str:
        made = children.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        return str(made.stdout)

    names = git("ls-tree", "-r", "--name-only", revision, "llmcli").split("\n")
    return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}


def folder_of(path: str) -> str:
    """`shell` for `llmcli/shell/files.py`, a command's own folder for what lies in one."""
    parts = path.removesuffix(".py").split("/")[1:]
    return "/".join(parts[:2]) if parts[0] == "commands" and len(parts) > 2 else parts[0]


def imported(tree: ast.Module) -> set[str]:
    """The folders of the package that a module imports from, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("llmcli.")}


def one_statement(node: ast.stmt) -> bool:
    """Whether a function has at most one statement besides its docstring."""
    assert isinstance(node, FUNCTION)
    return len(node.body) - (ast.get_docstring(node) is not None) <= 1


def main(revision: str | None) -> None:
    """Prints the table."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    edges: set[tuple[str, str]] = set()
    for path, text in sources(revision).items():
        tree, folder = ast.parse(text), folder_of(path)
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, FUNCTION)]
        decorators = [ast.unparse(d) for n in nodes if isinstance(n, ast.ClassDef)
                      for d in n.decorator_list]  # fmt: skip
        here = folder.split("/")[0]
        others = {other for other in imported(tree) if other != here}
        edges |= {(here, other) for other in others}
        rows[folder] += Counter({
            "lines": text.count("\n"), "files": 1, "functions": len(functions),
            "of one statement": sum(map(one_statement, functions)),
            "dataclasses": sum("dataclass" in name for name in decorators),
            "fmt: skip": len(re.findall(r"# fmt: skip", text)),
            "upwards": sum(LEVEL.get(o, -1) > LEVEL.get(here, 99) for o in others),
        })  # fmt: skip
    print(f"{'':24}" + "".join(f"{column:>18}" for column in COLUMNS))
    for folder, row in [*sorted(rows.items()), ("all", sum(rows.values(), Counter()))]:
        print(f"{folder:24}" + "".join(f"{row[column]:18,}" for column in COLUMNS))
    circles = sorted({tuple(sorted(edge)) for edge in edges if edge[::-1] in edges})
    print("import each other:", ", ".join(" and ".join(pair) for pair in circles) or "none")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
