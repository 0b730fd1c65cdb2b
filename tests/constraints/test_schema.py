"""Automata of schemas: `jsonschema` validates every accepted string, and unsupported schemas are refused."""

import functools
import json
import random
import time

import pytest

from mars_jax import constraints
from mars_jax.utils.errors import MarsError
from tests.helpers.automata import accepted_strings
from tests.helpers.schemas import SCHEMAS

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
    automaton = constraints.json_schema(schema, compact=compact).automaton
    for text in accepted_strings(automaton, rng, 60, 60):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(("schema", "values"), WRITTEN)
def test_what_python_writes_can_be_said(schema, values):
    constraint = constraints.json_schema(schema)
    for value in values:
        assert constraint.automaton.matches(json.dumps(value, ensure_ascii=False)), value
    assert not constraint.automaton.matches('{"a":1}')


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "object", "minProperties": 2}, "has 'minProperties', which cannot be enforced"),
        ({"oneOf": [{}]}, "'oneOf', which cannot be enforced|has no type"),
        ({"type": "int"}, "type at # is 'int': expected one of array"),
        ({"$ref": "#/$defs/x"}, "there is no such schema"),
        ({"$ref": "#"}, "deeper than 24 at #, or refers to itself"),
        ({"type": "number", "maximum": 3}, "has maximum: only a minimum of 0 can be enforced"),
        ({"type": "string", "format": "hostname"}, "format at # is 'hostname': expected one of date"),
        ({"type": "string", "maxLength": 1, "minLength": 2}, "less than minLength"),
        ({"const": "\ud800"}, "is not valid Unicode"),
        ({"type": "integer", "minimum": -(10**101)}, "expected a whole number of at most 100 digits"),
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


A, B = {"type": "string", "maxLength": 2}, {"type": "array", "items": {"type": "null"}}
VALUES = {
    "type": ["string", "integer", "number", "array", "object", "null", ["string", "null"], ["number", "integer"]],
    "enum": [["a", "abc", 1, 2.5, 1.0, None, True], [1, True, 0, False], [[1, "a"], {"a": 1}], ["a"]],
    "const": [1, "abc", True, None, [1], {"a": 1}, 1.0],
    "anyOf": [
        [{"type": "string"}, {"type": "number"}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"minLength": 1}, {"maxLength": 3}],
        [{"additionalProperties": False}, {"items": {"type": "null"}}],
        [{"$ref": "#/$defs/A"}, {"enum": ["abc", 1]}],
    ],
    "allOf": [[{"type": "string"}], [{"maxItems": 2}], [{"$ref": "#/$defs/B"}]],
    "$ref": ["#/$defs/A", "#/$defs/B"],
    "properties": [{"a": A, "b": {"type": "null"}}, {}, {"b": B}],
    "required": [["a"], ["b", "a"], []],
    "additionalProperties": [False, {"type": "null"}, True],
    "items": [{"type": "null"}, False, A, True],
    "prefixItems": [[{"type": "null"}, A], [B]],
    "minItems": [1, 0, 3],
    "maxItems": [1, 3, 0],
    "minLength": [1, 0, 4],
    "maxLength": [3, 0],
    "pattern": ["^[a-c]{2}$", "é|\\n"],
    "format": ["date", "ipv4", "uuid", "email", "time", "date-time"],
    "minimum": [0, -12, 5],
    "maximum": [20, -3],
    "exclusiveMinimum": [0, -7],
    "exclusiveMaximum": [3, 40],
}  # fmt: skip
ALIKE = [
    ("string", "minLength", "maxLength"),
    ("string", "pattern"),
    ("string", "format"),
    ("string", "enum", "const"),
    ("integer", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("number", "enum"),
    ("number", "minimum"),
    ("array", "items", "prefixItems", "minItems", "maxItems"),
    ("object", "properties", "required", "additionalProperties"),
]
"""Types, each with keywords that apply to it."""


def check_schema(schema, rng, count):
    """Return whether a schema is supported. Validate `count` of its strings, or check that one sentence refuses it."""
    jsonschema = pytest.importorskip("jsonschema")
    oracle = jsonschema.Draft202012Validator
    try:
        automaton = constraints.json_schema(schema, compact=rng.random() < 0.5).automaton
    except MarsError as error:
        message = str(error)
        assert message.endswith(".") and len(message) < 300 and "\n" not in message, message
        return False
    validator = oracle(schema, format_checker=oracle.FORMAT_CHECKER)
    for text in accepted_strings(automaton, rng, count):
        assert validator.is_valid(json.loads(text, parse_constant=pytest.fail)), (schema, text)
    return True


def random_schema(rng, depth=2, alike=None):
    """Return a random schema. Most of its keywords apply to one type."""
    kind, *names = alike = alike or rng.choice(ALIKE)
    if rng.random() < 0.15:
        names = [*VALUES]
    names = rng.sample(names, rng.randint(1, min(3, len(names))))
    names += [name for name in ("anyOf", "allOf", "$ref") if rng.random() < 0.08]
    keywords = {name: random_value(rng, name, depth, alike) for name in names}
    return {"type": kind, **keywords} if kind == "integer" or rng.random() < 0.6 else keywords


def random_value(rng, name, depth, alike):
    """Return a random value of a keyword."""
    if depth and rng.random() < 0.8:
        if name == "properties":
            return {key: random_schema(rng, depth - 1) for key in rng.sample("abc", rng.randint(1, 3))}
        if name in ("items", "additionalProperties"):
            return random_schema(rng, depth - 1)
        if name == "prefixItems":
            return [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        if name in ("anyOf", "allOf"):
            return [random_schema(rng, 0, alike) for _ in range(1 if name == "allOf" else rng.randint(1, 2))]
    return rng.choice(VALUES[name])


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_what_random_schemas_say_is_valid(count):
    rng = random.Random(count)
    schemas = ({**random_schema(rng), "$defs": {"A": A, "B": B}} for _ in range(count))
    supported = sum(check_schema(schema, rng, 10) for schema in schemas)
    assert supported > count / 3


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "integer", "enum": [1, "a", True, 2.0]}, ["1", "2.0"], ['"a"', "true"]),
        ({"type": ["string", "boolean"], "enum": [0, False, "a"]}, ["false", '"a"'], ["0"]),
        ({"const": {"b": 1, "a": 2}, "enum": [1, {"a": 2, "b": 1}]}, ['{"a": 2, "b": 1}'], ["1"]),
        (
            {"type": "string", "anyOf": [{"maxLength": 1}, {"enum": ["ab", 1]}]},
            ['"a"', '"ab"'],
            ['"b2"', "1"],
        ),
        (
            {
                "type": "object",
                "properties": {"a": B, "b": B},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a": []}', '{"b": []}', '{"a": [], "b": [null]}'],
            ["{}", '{"b": [], "a": []}'],
        ),
        ({"$ref": "#/$defs/A", "minLength": 2, "$defs": {"A": A}}, ['"ab"'], ['"a"', '"abc"']),
        ({"prefixItems": [{"type": "null"}, B], "maxItems": 1}, ["[null]"], ["[null, []]", "[]"]),
        (
            {"prefixItems": [B], "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
            ["[[], null]", "[[], null, null]"],
            ["[[]]", "[[], null, null, null]"],
        ),
        ({"type": "integer", "minimum": 10**20}, ["100000000000000000000"], ["1"]),
        ({"title": "any"}, ["null", "[1]"], ["nul"]),
    ],
)
def test_keywords_say_together_what_each_says(schema, allowed, refused):
    automaton = constraints.json_schema(schema).automaton
    assert [text for text in allowed + refused if automaton.matches(text)] == allowed


REFERENCES = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(10)} | {"d10": {}}


@pytest.mark.parametrize(
    ("make_schema", "sentence"),
    [
        (lambda: {"properties": {f"property {i}": A for i in range(20_000)}}, "the constraint is too large"),
        (lambda: {"$ref": "#/$defs/d0", "$defs": REFERENCES}, "the constraint is too large"),
        (lambda: {**B, "minItems": 10**9}, "the constraint is too large"),
        (lambda: {"enum": ["a" * 10_000_000]}, "the constraint is too large"),
        (lambda: {"pattern": "(a?){9999}"}, "the constraint is too large"),
        (lambda: '{"const": ' + "[" * 100_000 + "]" * 100_000 + "}", "more than 100 deep"),
        (
            lambda: functools.reduce(lambda inner, _: {"const": inner}, range(100_000), 1),
            "more than 100 deep",
        ),
        (lambda: {"const": [[float("nan")]]}, "cannot be written as JSON .*not JSON compliant"),
        (lambda: '{"enum": [1, 1e999]}', "cannot be written as JSON .*not JSON compliant"),
    ],
)
def test_a_schema_of_any_size_is_refused_within_seconds(make_schema, sentence):
    schema, start = make_schema(), time.process_time()
    with pytest.raises(MarsError, match=sentence) as caught:
        constraints.json_schema(schema)
    assert time.process_time() - start < 5 and len(str(caught.value)) < 300
