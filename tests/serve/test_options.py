"""The typed options of `generate` equal the fields of `Request`, the documented names, and the accepted arguments."""

import dataclasses
import inspect
import re

import mars_jax as mj
from mars_jax.serve.generation import generate, generate_iter, generate_stream
from mars_jax.serve.requests import CallOptions, Options, make_requests

INPUTS = {"prompt", "messages", "prompt_tokens", "id"}
"""Fields of `Request` that hold its input and are not options."""
FIELD_OF = {"banned_tokens": "logit_bias", "relax_constrained": "constraint"} | dict.fromkeys(
    ("regex", "json_schema", "choice", "allowed_tokens"), "constraint"
)
"""Options without a field of the same name, and the field that each sets."""


def keywords(function):
    """Return the names of the keyword-only arguments, without `**options`."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def test_options_are_the_fields_of_a_request_and_what_makes_one():
    fields = {field.name for field in dataclasses.fields(mj.Request)} - INPUTS
    assert Options.__optional_keys__ == fields | set(FIELD_OF)
    assert set(FIELD_OF.values()) <= fields and not Options.__required_keys__


def test_the_documentation_of_generate_names_the_options_and_no_other():
    documentation = generate.__doc__.split("**options:")[1].split("Raises:")[0]
    assert not {name for name in Options.__optional_keys__ if not re.search(rf"\b{name}\b", documentation)}
    prose = re.sub(r"\(.*?\)|`[^`]*`", "", documentation, flags=re.DOTALL)
    assert set(re.findall(r"\b[a-z]+_[a-z_]+\b", prose)) <= Options.__optional_keys__


def test_the_options_of_a_call_are_the_other_arguments_of_generate():
    call_options = CallOptions.__optional_keys__ - Options.__optional_keys__
    assert call_options == keywords(make_requests)
    for function in (generate_iter, generate_stream):
        assert keywords(generate) - keywords(function) == call_options
    assert keywords(mj.Chat.__init__) - {"verify"} < call_options
