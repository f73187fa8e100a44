"""The schemas of JSON documents that ship with the package, and what is wrong with a document."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

SCHEMAS = {
    file.name: json.loads(file.read_text("utf-8"))
    for file in files("llmcli").joinpath("assets/schemas").iterdir()
}
REGISTRY = Registry().with_resources(
    (name, DRAFT202012.create_resource(schema)) for name, schema in SCHEMAS.items()
)


def valid(document: Any, command: str) -> bool:
    """Whether nothing is wrong with it: the first error ends the search."""
    return _validator(command).is_valid(document)


def errors(document: Any, command: str) -> list[str]:
    """What is wrong with a document, by the command's schema; nothing is fetched for it."""
    return [
        f"{error.json_path}: {error.message[:300]}"
        for error in _validator(command).iter_errors(document)
    ]


@cache
def _validator(command: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"{command}.1.json"}, registry=REGISTRY)
