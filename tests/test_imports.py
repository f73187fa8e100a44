"""The layers of the package, read from its syntax trees: who may import whom, and what is heavy.

A part sees the `LAYERS` before its own; ui sees only records, and a command's view besides only its
own report. In a command's folder `measure`, `report` and `view` (a file or a folder) are what they
say, `options` is what was requested and lies where `report` does; all else runs them. Commands do
not import each other: `cli.tree` names them, and what one shows of another's.
"""

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import llmcli

ROOT = Path(llmcli.__file__).parent
# What lies under `assets` is data: the script there trains a model and is run by itself.
FILES = sorted(file for file in ROOT.rglob("*.py") if not file.is_relative_to(ROOT / "assets"))
LAYERS = """
    errors xdg limits processor records ← config ← checkpoints ← text families ← graph ←
    evaluate kernels triton build ← prepare ops devices ← weights ← nn ← parts ← decoder ← model ←
    loading engine ← measure ← shell ← inspect ← report ← measure_of_a_command ← command ← cli ←
    __main__
"""
LAYER = {part: level for level, one in enumerate(LAYERS.split("←")) for part in one.split()}
# Neighbours of one layer that build on each other, in this direction only.
BESIDE = {("devices", "ops"), ("processor", "limits")}
VIEWS = ("ui", "view")
TORCH_FREE = {
    *("errors", "xdg", "config", "records", "graph", "checkpoints", "families"),
    *("limits", "processor", "text", "kernels", "prepare", "ui", "report", "view", "cli", "shell"),
    *("command", "__main__"),
}
# Third-party modules that may be imported when a module is, per part: they are light, or the part
# is imported only for them. Everything else goes into a function.
COMPUTES = ("ops", "devices", "weights", "nn", "parts", "decoder", "model", "loading", "engine")
AT_TOP = {
    "cli": {"typer"},
    "shell": {"typer"},
    "command": {"typer"},
    "ui": {"rich", "numpy"},
    "view": {"rich", "numpy"},
    "text": {"jinja2"},  # `text.template_server`, which runs in a process of its own
    **{part: {"torch"} for part in (*COMPUTES, "evaluate")},
    "build": {"setuptools"},  # which runs when the package is installed
    "triton": {"torch", "triton"},  # the kernels of a card, loaded where they are used
    **{part: {"torch", "numpy"} for part in ("inspect", "measure", "measure_of_a_command")},
}
# … and what may be imported inside a function, wherever that is.
INSIDE = {
    *("torch", "huggingface_hub", "gguf", "numpy", "jinja2", "tokenizers", "rich", "typer", "PIL"),
    "sentencepiece",
    "prompt_toolkit",
    *("transformers", "llama_cpp"),  # peers to compare with, where they are installed
}
FAMILY_NAMES = re.compile(
    r"gpt_?2|llama(?!_?3|cpp|\.cpp)|mistral|qwen|smollm|gemma|mixtral|olmoe?|glm_?4|deepseek", re.I
)
FORBIDDEN = {"hasattr", "getattr", "model_type", "family"}


def part_of(module):
    """`families` for `llmcli.families.rules`; the package itself is ``.

    In a command's folder by file name, see above; `llmcli.kernels.triton` and `.build` are parts of
    their own.
    """
    if module.startswith(("llmcli.kernels.triton", "llmcli.kernels.build")):
        return module.split(".")[2]
    folder, _, _ = module.rpartition(".")
    if folder.startswith("llmcli.commands."):
        kind = module.split(".")[3:4] or [""]
        parts = {"measure": "measure_of_a_command", "view": "view"}
        parts |= dict.fromkeys(("report", "options"), "report")
        return parts.get(*kind, "command")
    return module.split(".")[1] if "." in module else ""


def command_of(module):
    """`bench` for what lies in the folder of that command, empty elsewhere."""
    return module.split(".")[2] if module.startswith("llmcli.commands.") else ""


def name_of(file):
    parts = ("llmcli", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree, module=""):
    """(module imported, when): `top` as the module is, `inside` a function, `types` for mypy."""
    pending = [(tree, "top")]
    while pending:
        node, when = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when = "inside"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when = "types"
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            for alias in node.names:  # `from llmcli import errors` names a module too
                known = f"{node.module}.{alias.name}" in MODULES
                yield (f"{node.module}.{alias.name}" if known else node.module or ""), when
        children = ast.iter_child_nodes(node)  # no expression imports anything
        pending += ((child, when) for child in children if not isinstance(child, ast.expr))


MODULES = {name_of(file) for file in FILES}


@cache  # not when it is collected: that takes seconds of every worker
def trees():
    return {name_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


@cache
def imported():
    return {module: sorted(set(imports(tree, module))) for module, tree in trees().items()}


@cache
def edges_at_top():
    return {
        module: [name for name, at in found if at == "top"] for module, found in imported().items()
    }


def layer_faults(module, targets):
    """What is wrong with `module` importing each of those modules of ours."""
    me = part_of(module)
    for name in targets:
        other = part_of(name)
        if command_of(name) and command_of(name) != command_of(module):
            yield f"{module} imports {name}"
        if other in ("", me):
            continue
        if me in VIEWS:
            allowed = other in ("records", "ui") or (me == "view" and other == "report")
        elif other in VIEWS:
            allowed = me in ("cli", "shell", "command")
        else:
            allowed = LAYER[other] < LAYER[me] or (me, other) in BESIDE
        if not allowed:
            yield f"{module} imports {name}"


def torch_paths(module, edges):
    """Modules of ours that are loaded when `module` is and that load torch themselves."""
    seen, pending = set(), [module]
    while pending:
        name = pending.pop()
        if name in seen or name not in edges:
            continue
        seen.add(name)
        pending += [target for target in edges[name] if target.startswith("llmcli")]
        pending += [name.rpartition(".")[0]] if "." in name else []
    return sorted(name for name in seen if any(t.split(".")[0] == "torch" for t in edges[name]))


def test_modules_import_only_what_lies_below_them():
    modules = sorted(MODULES - {"llmcli"})
    known = {*LAYER, *VIEWS, "commands"}
    assert {part_of(module) for module in modules} <= known, "a part without a layer"
    ours = {m: [n for n, _ in imported()[m] if n.split(".")[0] == "llmcli"] for m in modules}
    assert not [fault for m in modules for fault in layer_faults(m, ours[m])]


def test_torch_free_modules_load_no_torch_even_through_others():
    free = sorted(module for module in MODULES if part_of(module) in TORCH_FREE | {""})
    found = {module: torch_paths(module, edges_at_top()) for module in free}
    assert {module: paths for module, paths in found.items() if paths} == {}


def loaded(module):
    """What importing `module` loads: what it names, and the packages around that."""
    for target in edges_at_top()[module]:
        if target in MODULES:
            yield target
            inside = target.rpartition(".")[0]
            while inside and not f"{module}.".startswith(f"{inside}."):
                yield inside
                inside = inside.rpartition(".")[0]


def test_no_module_imports_itself_through_others():
    TopologicalSorter({module: set(loaded(module)) for module in MODULES}).prepare()


def third_party_faults(module):
    for name, when in imported()[module]:
        root = name.split(".")[0]
        if root == "llmcli" or root in sys.stdlib_module_names or when == "types":
            continue
        allowed = AT_TOP.get(part_of(module), set()) if when == "top" else INSIDE
        if root not in allowed:
            yield f"{module} imports {name} ({when})"


def test_third_party_modules_are_imported_where_they_may_be():
    assert not [fault for module in sorted(MODULES) for fault in third_party_faults(module)]


def words(tree):
    """Identifiers and strings of a module, docstrings aside: a comment may name anybody."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from () if id(node) in docstrings else (node.value,)


def forks(tree):
    """Words by which a part would ask whose model it is computing."""
    return sorted({w for w in words(tree) if w in FORBIDDEN or FAMILY_NAMES.search(w)})


def test_parts_know_no_family():
    model = {"nn", "weights", "ops", "parts", "decoder", "graph", "evaluate"}
    found = {m: forks(trees()[m]) for m in sorted(MODULES) if part_of(m) in model}
    assert {module: words for module, words in found.items() if words} == {}


def calls_with_state(tree):
    """Calls that make a decoder's state, or give one to a decoder."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.removesuffix(".__call__").rpartition(".")[2]
        given = len(node.args) > 1 or any(word.arg in ("state", None) for word in node.keywords)
        if name == "new_state" or (name.lower() == "decoder" and name != "Decoder" and given):
            yield ast.unparse(node)


def test_the_session_alone_calls_a_decoder_with_a_state():
    found = {module: list(calls_with_state(tree)) for module, tree in trees().items()}
    parts = {"nn", "parts", "decoder"}  # the decoder itself
    outside = {m: calls for m, calls in found.items() if calls and part_of(m) not in parts}
    assert set(outside) == {"llmcli.engine.session"}, outside
    assert len(outside["llmcli.engine.session"]) == 2  # it makes the state, and one call


@pytest.mark.parametrize("source", [
    "model.decoder(ids, state, logits='last')", "decoder(ids, state=kept)",
    "self.weights.decoder(ids, **options)", "decoder.__call__(ids, state)",
    "model.decoder.new_state(1, 8)",
])  # fmt: skip
def test_a_call_with_a_state_is_found(source):
    assert len(list(calls_with_state(ast.parse(source)))) == 1
    for other in ("decoder(ids, tap=tap, until=3)", "Decoder(config, arithmetic, device=device)"):
        assert not list(calls_with_state(ast.parse(other)))


# a module, what it says, and whether it may
LAYERED = """
graph.x: from llmcli.nn.linear import Linear: no
families.x: from llmcli.checkpoints import Checkpoint: yes
checkpoints.x: import llmcli.families: no
nn.x: from llmcli.loading.load import load: no
ops.x: from llmcli import nn: no
evaluate.x: from llmcli.ops import rope: no
graph.x: from llmcli.evaluate import rule: no
ops.x: from llmcli.kernels import native: yes
ops.x: from llmcli.weights.weight import Weight: no
kernels.x: from llmcli.ops import linear: no
ui.x: from llmcli.errors import LlmcliError: no
ui.x: from llmcli.records import Report: yes
measure.x: from llmcli.shell.output import Output: no
inspect.x: from llmcli.ui import theme: no
cli.x: from llmcli.ui import theme: yes
shell.x: from llmcli.cli.tree import root: no
commands.x.command: from llmcli.cli.tree import root: no
cli.x: from llmcli.shell.output import Output: yes
commands.x.view: from llmcli.inspect import observe: no
commands.x.measure: from llmcli.commands.x.report import Report: yes
commands.x.look: from llmcli.commands.y.report import Report: no
commands.x.view.y: from llmcli.commands.y.view.x import view: no
commands.x.report: from llmcli.commands.x.measure import measure: no
"""


@pytest.mark.parametrize("row", LAYERED.strip().split("\n"))
def test_the_layer_rule_can_fail(row):
    module, source, may = row.split(": ")
    targets = [name for name, _ in imports(ast.parse(f"def f():\n    {source}"))]
    assert len(list(layer_faults(f"llmcli.{module}", targets))) == (may == "no")


def test_the_other_rules_can_fail():
    edges = {"llmcli.a": ["llmcli.b.c"], "llmcli.b.c": ["os"], "llmcli.b": ["torch.nn"]}
    assert torch_paths("llmcli.a", edges) == ["llmcli.b"]
    guarded = "if TYPE_CHECKING:\n    import torch\ndef f():\n    import gguf\nimport os"
    found = {("torch", "types"), ("gguf", "inside"), ("os", "top")}
    assert set(imports(ast.parse(guarded))) == found
    asked = 'def f(c):\n    """Qwen."""\n    # llama\n    return getattr(c, "x") or "Gemma" in n'
    assert forks(ast.parse(asked)) == ["Gemma", "getattr"]
    assert forks(ast.parse("x = config.model_type")) == ["model_type"]
    assert forks(ast.parse("x = Llama3Scaling")) == []  # a kind of rotation, used by many
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()
