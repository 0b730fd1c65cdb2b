"""What a schema's automaton says, `jsonschema` finds valid; and what cannot be held to is refused."""

from __future__ import annotations

import json
import random

import pytest

from mars_jax import constraints
from mars_jax.core.errors import MarsError
from tests.constraints.test_automaton import said_by

POINT = {
    "type": "object",
    "properties": {
        "d": {"type": "string", "format": "date"},
        "e": {"type": "string", "pattern": '^[a"\\\\\\n]{2}$'},
    },
    "required": ["d", "e"],
}
SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", 'b"c', 3]}, "maxItems": 3},
            "x": {"type": ["number", "null"]},
        },
        "required": ["age"],
    },
    {"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "maxItems": 2, "$defs": {"p": POINT}},
    {"type": "object"},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "exclusiveMinimum": -57, "maximum": 1234}]},
    {
        "type": "array",
        "prefixItems": [
            {"type": "string", "minLength": 2, "maxLength": 3},
            {"type": "number", "minimum": 0},
        ],
        "items": False,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "string", "format": "date-time"},
)
WRITTEN = (
    ({}, [1, -0.5, "é\n", None, [True, []], {"a": {}}]),
    (SCHEMAS[0], [{"age": 3}, {"name": "x\t", "age": 130, "tags": [], "x": None}, {"age": 1, "x": -1.5}]),
    (SCHEMAS[5], [{}, {"ü": -2}]),
)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("compact", [False, True])
def test_what_is_said_is_valid(schema, compact):
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(1)
    made = constraints.json_schema(schema, compact=compact).automaton
    texts = [text for _ in range(100) if (text := said_by(made, rng, 60)) is not None]
    assert len(texts) > 30
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(("schema", "values"), WRITTEN)
def test_what_python_writes_can_be_said(schema, values):
    made = constraints.json_schema(schema)
    for value in values:
        assert made.automaton.matches(json.dumps(value, ensure_ascii=False)), value
    assert not made.automaton.matches('{"a":1}')


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "object", "minProperties": 2}, "has 'minProperties', which cannot be held to"),
        ({"oneOf": [{}]}, "'oneOf', which cannot be held to|has no type"),
        ({"type": "int"}, "the type at # is 'int': expected one of array"),
        ({"$ref": "#/$defs/x"}, "there is no such schema"),
        ({"$ref": "#"}, "deeper than 24 at #, or refers to itself"),
        ({"type": "number", "maximum": 3}, "has maximum: only a minimum of 0 can be held to"),
        ({"type": "string", "format": "hostname"}, "the format at # is 'hostname': expected one of date"),
        ({"type": "string", "maxLength": 1, "minLength": 2}, "less than minLength"),
        ({"type": ["string", {}]}, "the type at # is {}: expected one of array"),
        ({"type": 3}, "the type at # is 3: expected one of array"),
        ({"allOf": {"type": "null"}}, "allOf at # is {'type': 'null'}: expected a list"),
        ({"type": "object", "properties": [1]}, r"the properties at # are \[1\]: expected an object"),
        (
            {"type": "object", "properties": {"a": {}}, "required": "a"},
            "required at # is 'a': expected a list",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "required": [["a"]]},
            r"requires \['a'\], which no property",
        ),
        ({"type": "array", "prefixItems": 3}, "prefixItems at # is 3: expected a list"),
        ({"type": "string", "pattern": 5}, "the pattern at # is 5: expected a text"),
        ({"type": "string", "format": ["date"]}, r"the format at # is \['date'\]: expected one of date"),
        ({"const": "\ud800"}, "is not valid Unicode"),
        ({"type": "integer", "minimum": -(10**101)}, "expected a whole number of at most 100 digits"),
        ({"type": "integer", "maximum": 10**1000}, "maximum at # is a number of 3322 bits"),
        ({"type": "integer", "maximum": 10**5000}, "the schema cannot be written as JSON .*integer string"),
        ({"const": object}, "the schema cannot be written as JSON .*not JSON serializable"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "requires 'a'"),
        ("{", "the schema is not JSON"),
        ("no/such.json", "cannot be read"),
        ([1], "expected a JSON object"),
    ],
)
def test_what_cannot_be_held_to_gets_a_sentence(schema, sentence):
    with pytest.raises(MarsError, match=sentence):
        constraints.json_schema(schema)
