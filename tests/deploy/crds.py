"""Manifests against the schemas of foreign resources, as an API server with `fieldValidation: Strict` reads them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

TYPES: Final = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}

Schemas = Mapping[tuple[str, str], Mapping[str, Any]]


def schemas_of(folder: Path) -> Schemas:
    """By apiVersion and kind, out of a folder of CustomResourceDefinitions."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        spec = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return found


def faults(schema: Mapping[str, Any], value: Any, at: str = "") -> Iterator[str]:
    """What is unknown, missing or of another type. Rules in CEL are not evaluated."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{at}: {value!r} is no number or text"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{at}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{at}: {len(value)} items"
        for number, each in enumerate(value):
            yield from faults(schema["items"], each, f"{at}[{number}]")
    if isinstance(value, dict):
        yield from (f"{at}.{key}: missing" for key in schema.get("required", ()) if key not in value)
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or (
            kind == "object" and not known and rest is None
        )
        for key, each in value.items():
            inner = known.get(key, rest)
            if isinstance(inner, Mapping):
                yield from faults(inner, each, f"{at}.{key}")
            elif not is_open:
                yield f"{at}.{key}: unknown"
