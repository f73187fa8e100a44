"""The schemas of JSON documents that ship with the package, and what is wrong with a document."""

from __future__ import annotations

import json
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


def errors(document: Any, command: str) -> list[str]:
    """What is wrong with a document, by the command's schema; nothing is fetched for it."""
    validator = Draft202012Validator({"$ref": f"{command}.1.json"}, registry=REGISTRY)
    return [
        f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)
    ]
