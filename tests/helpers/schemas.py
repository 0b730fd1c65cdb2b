"""JSON schemas that cover the supported keywords."""

POINT = {
    "type": "object",
    "required": ["d", "e"],
    "properties": {
        "d": {"type": "string", "format": "date"},
        "e": {"type": "string", "pattern": '^[a"\\\\\\n]{2}$'},
    },
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
        "prefixItems": [{"type": "string", "minLength": 2, "maxLength": 3}, {"type": "number", "minimum": 0}],
        "items": False,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "string", "format": "date-time"},
)
