"""The JSON schemas of `llmcli/assets/schemas`, from the types of reports: run this to write them.

A dataclass is an object with its fields (all but `OPTIONAL` ones are required) and its `derived`
properties; its docstring is the description. A float may be null, for that is what NaN becomes.
What commands share is in `common.1.json`, where the model, which is no dataclass, and the rule of
checks are written by hand. So are the files of reports that are put together for the document.
"""

import dataclasses
import inspect
import json
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import llmcli
from llmcli.commands.attention.report import LayerReport, LayerStates
from llmcli.records.document import member_metadata
from llmcli.records.machine import Ceilings, Environment, MachineLoad
from llmcli.records.ranges import Range
from llmcli.records.text import Generated
from llmcli.shell.prompts import Prompt

FOLDER = Path(llmcli.__file__).parent / "assets" / "schemas"
PLAIN = {str: "string", int: "integer", bool: "boolean", PurePath: "string"}
COMMON = {Environment: "environment", MachineLoad: "machine_load"}  # names in `common.1.json`
MODEL = {"$ref": "common.1.json#/$defs/model"}
WHOLE_MODEL = {"$ref": "common.1.json#/$defs/whole_model"}
CHECKS = {"$ref": "common.1.json#/$defs/checks"}
NONE = {"type": "null"}


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a command prints: a report (`module:class`, or none) and what is around it.

    `judged`: it has `checks` and `ok`. `others`: types, or schemas, of what is in the document
    besides the report's members, or in place of one; `added`: of further members of a dataclass in
    it. `optional`: what of these and of the head it may go without. `rules`: keywords about the
    whole. `defines`: more types for `$defs`.
    """

    report: str = ""
    model: Mapping[str, Any] = field(default_factory=lambda: WHOLE_MODEL)
    judged: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)
    defines: tuple[type, ...] = ()


def object_of(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """An object with these keys, of plain types."""
    properties = {name: schema_of(kind, {}) for name, kind in kinds.items()}
    return {"type": "object", "required": list(kinds), "properties": properties}


FAILED = {"properties": {"ok": {"const": False}}}


def bad(*conditions: Any) -> dict[str, Any]:
    """A rule: where one of `conditions` holds, `ok` is false; a text names a member that is one."""
    known = [{"properties": {one: {"type": "string"}}} if isinstance(one, str) else one
             for one in conditions]  # fmt: skip
    return {"if": {"anyOf": known}, "then": FAILED}


# Keywords about whole documents. LOADED: where nothing was loaded of a model, its file is known and
# no more. KNOWN: a known architecture has all that follows from it; otherwise the reason is given.
# STATES: `attention` has maps of tokens, or with `--what state` what recurrences remember of them.
RULES = json.loads(Path(__file__).with_name("schema_rules.json").read_text("utf-8"))
OF_MAPS = tuple(RULES["STATES"]["else"]["required"])


def schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; those of the dataclasses in it are put into `definitions` by name."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated and get_origin(parts[1]) is tuple:  # an array, as a document has it
        return schema_of(parts[1], definitions)
    if origin is Annotated:
        ranges = [bounds(one) for one in parts[1:] if isinstance(one, Range)]
        plain = {"type": "number"} if ranges and parts[0] is float else None
        return (plain or schema_of(parts[0], definitions)) | (ranges[0] if ranges else {})
    if kind is float:
        return {"type": ["number", "null"]}
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind in (None, type(None)):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        return either([schema_of(part, definitions) for part in parts])
    if kind in COMMON:
        return {"$ref": f"common.1.json#/$defs/{COMMON[kind]}"}
    if dataclasses.is_dataclass(kind):
        name = kind.__name__
        if name not in definitions:
            definitions[name] = {}  # for a type that has itself in it
            definitions[name] = of_dataclass(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(parts[1], definitions)}
    if origin is tuple and Ellipsis not in parts:
        items = [schema_of(part, definitions) for part in parts]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return {"type": "array", "items": schema_of(parts[0], definitions)}
    if kind not in (Any, object):
        raise TypeError(f"no schema for {kind}")
    return {}


def bounds(of: Range) -> dict[str, Any]:
    """The keywords for the numbers of a range."""
    found = {"exclusiveMinimum" if of.above else "minimum": of.low}
    if of.high is not None:
        found["maximum"] = of.high
    return found if of.or_else is None else {"anyOf": [found, {"const": of.or_else}]}


def either(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """One of these; types without more to say are one list."""
    if not all(set(schema) == {"type"} for schema in schemas):
        return {"anyOf": schemas}
    names = [schema["type"] for schema in schemas]
    flat = [one for name in names for one in (name if isinstance(name, list) else [name])]
    return {"type": list(dict.fromkeys(flat))}


def of_dataclass(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The object that a dataclass is in a document; a `FLAT` field's members are its own.

    Those of a field that may be None are there together, or not at all.
    """
    hints, found = hints_of(kind), {}
    members, together = member_metadata(kind), {}
    optional = {name for name, metadata in members.items() if metadata.get("optional")}
    for name, metadata in members.items():
        if metadata.get("flat"):
            parts = get_args(hints[name]) or (hints[name],)
            inner = flat(parts[0], definitions)
            found |= inner
            if type(None) in parts:
                optional |= inner.keys()
                together |= {one: [other for other in inner if other != one] for one in inner}
            continue
        if name in hints:
            found[name] = schema_of(hints[name], definitions)
            continue
        owner = next(one for one in kind.__mro__ if name in vars(one))
        one = vars(owner)[name]
        hint = hints_of(one.fget, owner).get("return", Any)
        found[name] = schema_of(hint, definitions) | {"description": words(one)}
    return {
        "description": words(kind), "type": "object",
        "required": [name for name in found if name not in optional], "properties": found,
        **({"dependentRequired": together} if together else {}),
    }


def flat(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The members of a dataclass, or of a mapping with known keys."""
    if is_typeddict(kind):
        return {name: schema_of(hint, definitions) for name, hint in get_type_hints(kind).items()}
    members: dict[str, Any] = of_dataclass(kind, definitions)["properties"]
    return members


def hints_of(of: Any, owner: type | None = None) -> dict[str, Any]:
    """Annotations, with the names that a module imports for its types alone."""
    names: dict[str, Any] = {}
    pattern = re.compile(r"^    from (\S+) import (.+)$", re.MULTILINE)
    for one in reversed((owner or of).__mro__[:-1]):
        module = sys.modules[one.__module__]
        names |= vars(module)
        for where, imported in pattern.findall(inspect.getsource(module)):
            found = vars(import_module(where))
            names |= {name: found[name] for name in re.findall(r"\w+", imported) if name in found}
    return get_type_hints(of, names, include_extras=True)


def words(documented: Any) -> str:
    """A docstring on one line, with JSON's word for None."""
    return re.sub(r"\bNone\b", "null", " ".join((inspect.getdoc(documented) or "").split()))


def paired_caches() -> dict[str, Any]:
    """Ceilings as receipts have them: each cache is [level, bytes]."""
    found = of_dataclass(Ceilings, {})
    found["properties"]["caches"] = schema_of(tuple[tuple[str, int], ...], {})
    return found


# a tensor of a file that nothing describes
STORED = {"type": "array", "items": object_of({
    "name": str, "kind": Literal["parameter"], "axes": None, "shape": tuple[int, ...], "dtype": str,
    "bytes": int, "phase": None, "layer": None, "formula": None, "source": str,
    "stored_shape": tuple[int, ...], "stored_format": str, "stored_bytes": int,
    "operations": tuple[str, ...],
})}  # fmt: skip

# of a stream of documents the first one alone has a head
HEAD = {"dependentRequired": {"model": ["environment"], "environment": ["model"]}}
SPECULATION = {"$ref": "common.1.json#/$defs/speculation"}
DOCUMENTS: dict[str, Document | tuple[Document, ...]] = {
    "env": Document(report="commands.env.report:EnvironmentReport", model=NONE),
    "models-list": Document(report="records.models:ModelsReport", model=NONE),
    "models-pull": Document(report="records.models:PullReport", model=NONE),
    "models-rm": Document(report="records.models:RemovalReport", model=NONE),
    "models-prune": Document(report="records.models:PruneReport", model=NONE),
    "tokens": Document(
        report="commands.tokens.view:TokensReport",
        model=MODEL | {
            "required": ["model_type", "tokenizer"], "properties": {"tokenizer": {"type": "string"}}
        },
    ),
    "dump": Document(
        report="commands.dump.report:DumpReport", judged=True, rules=bad("not_finite"),
        others={
            "prompt": object_of({"text": str | None, "ids": tuple[int, ...]}),
            "file": either([object_of({"path": str, "bytes": int}), {"type": "null"}]),
        },
    ),
    "attention": Document(
        report="commands.attention.report:AttentionReport", judged=True, rules=RULES["STATES"],
        others={
            "what": Literal["pattern", "scores", "state"], "positions": tuple[int, ...],
            "layers": tuple[LayerReport, ...] | tuple[LayerStates, ...],
        },
        added={"HeadReport": {"pattern": RULES["MATRIX"], "scores": RULES["MATRIX"]}},
        optional=(*OF_MAPS, "positions"),
    ),
    "experts": Document(
        report="commands.experts.report:ExpertsReport", judged=True,
        others={"checks": {"required": ["choice", "weights", "sum", "loads"]}},
    ),
    "attribute": Document(report="commands.attribute.report:AttributeReport", judged=True),
    "patch": Document(report="commands.patch.report:PatchReport", judged=True),
    "ablate": Document(report="commands.ablate.report:AblateReport", judged=True),
    "lens": Document(report="commands.lens.report:LensReport", judged=True),
    "weights": tuple(
        Document(report=f"commands.weights.report:{report}", judged=True)
        for report in ("WeightsReport", "SpectraReport", "HeadsReport", "CompositionReport")
    ),
    "ladder": Document(
        report="commands.ladder.report:LadderReport",
        rules=bad({"properties": {"rungs": {"contains": FAILED}}}),
    ),
    "explain": Document(
        report="commands.explain.report:Explanation",
        others={
            "letters": {"type": "array",
                        "items": object_of({"letter": str, "value": int, "words": str})},
        },
    ),
    "load": Document(
        report="commands.load.report:LoadReport", model=MODEL, judged=True,
        rules={**bad("not_finite", "fault", RULES["REFUSED"]), "allOf": [RULES["LOADED"]]},
    ),
    "bench": Document(
        report="commands.bench.report.row:BenchReport",
        model={"anyOf": [NONE, WHOLE_MODEL]},
        others={
            "models": {"type": "array", "items": WHOLE_MODEL},
            "checks": CHECKS,
        },
        rules={"allOf": [{"properties": {"rows": {"items": RULES["FAILED_ROW"]}}}]},
    ),
    "timing": Document(report="commands.timing.report:TimingReport", judged=True),
    "selftest": Document(
        report="commands.selftest.report:SelftestReport", model=NONE, judged=True,
        others={"ceilings": either([paired_caches(), NONE])},
    ),
    "info": (
        Document(
            report="commands.info.report:InfoReport", judged=True, rules=RULES["KNOWN"],
            model=MODEL | {"required": ["family", "stored_formats"]},
        ),
        Document(report="commands.info.report:FamiliesReport", model=NONE),
    ),
    "shapes": (
        Document(report="commands.shapes.report:ShapesReport", judged=True),
        Document(report="commands.shapes.report:NamesReport"),
        Document(
            model=MODEL | {"required": ["stored_formats"]},
            others={"tensors": STORED, "checks": CHECKS},
            rules={"description": "The tensors of a file without a configuration."},
        ),
    ),
    "generate": Document(
        report="commands.generate.report:RunReport",
        others={"index": int, "prompt": Prompt, "outputs": tuple[Generated, ...],
                "speculation": SPECULATION},
        optional=("model", "environment", "index"),
        rules={
            "description": "With --batch one such document a line, each with the `index` of its "
            "prompt; the first line alone has the model and the environment.",
            **HEAD, "anyOf": [{"required": ["model"]}, {"required": ["index"]}],
        },
    ),
    "chat": Document(
        report="shell.conversations:Transcript",
        others={
            "tokens": object_of({"prompt": int, "computed": int, "generated": int}),
            "timings": object_of({"prompt_s": float, "decode_s": float}),
            "speculation": SPECULATION,
        },
        optional=("model", "environment", "tokens", "timings", "speculation"),
        rules={
            "title": "llmcli chat --save FILE",
            "description": "A conversation. chat --json writes one such document a line: the two "
            "messages of a turn, and what its answer took (`tokens` of the prompt, those of it "
            "that had not been read before, and of the answer); the first line alone has the "
            "model and the environment.",
            **HEAD, "anyOf": [{"required": ["model"]}, {"required": ["tokens", "timings"]}],
        },
    ),
    "score": Document(report="commands.score.report:Score"),
    "diff": Document(
        report="commands.diff.report:DiffReport", judged=True,
        others={
            "b": either([WHOLE_MODEL, {"type": "object", "required": ["engine", "engine_version"]}])
        },
    ),
    "bench-compare": Document(
        report="commands.bench.report.comparison:ComparisonReport", model=NONE
    ),
}  # fmt: skip


def schema(name: str, *documents: Document) -> dict[str, Any]:
    """The schema of what one command prints: one of these documents."""
    definitions: dict[str, Any] = {}
    first, *others = [document_schema(name, one, definitions) for one in documents]
    used = str([first, others, definitions])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"llmcli {name.replace('-', ' ', 1)} --json",
        **(first if not others else {
            "properties": {"schema": first["properties"]["schema"]}, "oneOf": [first, *others],
        }),
        "$defs": {one: d for one, d in definitions.items() if f"'#/$defs/{one}'" in used},
    }  # fmt: skip


def document_schema(name: str, document: Document, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one document; those of the dataclasses in it are put into `definitions`."""
    whole: dict[str, Any] = {"description": "", "properties": {}, "required": []}
    if document.report:
        module, _, kind = document.report.partition(":")
        whole = of_dataclass(getattr(import_module(f"llmcli.{module}"), kind), definitions)
    if document.judged:
        for shared in ("checks", "ok"):
            whole["properties"].pop(shared, None)
    found = {
        "schema": {"const": f"llmcli.{name}/1"}, "model": document.model,
        "environment": {"$ref": "common.1.json#/$defs/environment"}, **whole["properties"],
    }
    for kind in document.defines:
        schema_of(kind, definitions)
    for other, kind in document.others.items():
        found[other] = kind if isinstance(kind, dict) else schema_of(kind, definitions)
    for other, more in document.added.items():
        definitions[other]["properties"] |= more
    optional = {*whole["properties"]} - {*whole["required"]} | {*document.optional}
    return {
        "description": whole["description"],
        **({"$ref": "common.1.json#/$defs/judged"} if document.judged else {"type": "object"}),
        "required": [name for name in found if name not in optional],
        "properties": found,
        **document.rules,
    }


def common() -> dict[str, Any]:
    """What the documents share: the file as it is, with what has a type written anew."""
    whole: dict[str, Any] = json.loads((FOLDER / "common.1.json").read_text("utf-8"))
    for kind, name in COMMON.items():
        whole["$defs"][name] = of_dataclass(kind, {})
    return whole


def schemas() -> dict[str, str]:
    """The text of each file that is written from types, by its name."""
    found = {f"{name}.1.json": schema(name, *(one if isinstance(one, tuple) else (one,)))
             for name, one in DOCUMENTS.items()}  # fmt: skip
    found["common.1.json"] = common()
    return {name: pretty(one) + "\n" for name, one in found.items()}


def pretty(value: Any, indent: str = "") -> str:
    """JSON; what fits into a line of 110 columns is on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= 110 or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + pretty(v, inner) for v in value) + f"\n{indent}]"
    pairs = (f"{inner}{json.dumps(key)}: {pretty(v, inner)}" for key, v in value.items())
    return "{\n" + ",\n".join(pairs) + f"\n{indent}}}"


def main() -> None:
    """Writes the files."""
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
