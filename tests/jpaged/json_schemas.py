"""Random JSON schemas, and whether a value is what one asks for."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "city", "tags", "price", "ok", "kind", "id", "parent", "notes"]
WORDS = ["red", "green", "blue", "small", "large", "north", "south"]


def make_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object of one to four properties, some of them objects and lists down to `depth`."""
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: make_value(rng, depth - 1) for name in names},
        "required": names if rng.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def make_value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "null", "either"]
    kind = rng.choice(kinds + (["object", "array"] * 2 if depth > 0 else []))
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 8)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-5, 0), "maximum": rng.randint(1, 120)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 10}
    if kind == "enum":
        return {"enum": rng.sample(WORDS, 3)}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 7, True])}
    if kind == "either":
        return {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]}
    if kind == "array":
        most = rng.randint(1, 3)
        return {"type": "array", "items": make_value(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": most}
    return make_schema(rng, depth) if kind == "object" else {"type": kind}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a parsed JSON value is as `schema` says, for the keywords used above."""
    if "anyOf" in schema:
        return any(conforms(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"] and type(value) is type(schema["const"])
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(conforms(each, properties[name]) for name, each in value.items())
        )
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(conforms(each, schema["items"]) for each in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        types = (int,) if kind == "integer" else (int, float)
        right = isinstance(value, types) and not isinstance(value, bool)
        return right and schema["minimum"] <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)
