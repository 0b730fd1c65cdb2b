"""Bounded chat templates: they render the same text as Jinja's sandbox, and hostile ones are refused quickly."""

from __future__ import annotations

import time

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from mars_jax.assets.catalogue import MODELS, template_of
from mars_jax.hub import chat_template
from mars_jax.hub.chat_template import BoundedEnvironment, bounded_templates
from tests.helpers.chat_templates import HOSTILE


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_by_its_limit(name, monkeypatch):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.2)
    environment = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    start, limit = time.thread_time(), r"more than [\d,]+|expected at most|not supported|in the millions"
    with pytest.raises(TemplateError, match=limit):
        environment.from_string(HOSTILE[name]).render(messages=[])
    assert time.thread_time() - start < 3


FEATURES = """
{%- macro turn(message, last=false) %}{{ message.role | upper }}: {{ message['content'] | trim }}{% endmacro %}
{%- set ns = namespace(text='', count=0) %}
{%- for message in messages[1:] if message.role != 'tool' %}
{%- set ns.text = ns.text ~ turn(message, loop.last) ~ '\\n' %}{% set ns.count = ns.count + 1 %}
{%- if loop.index > 7 %}{% break %}{% endif %}
{%- else %}nobody{% endfor %}
{{- ns.text }}{{ ns.count * 2 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ '%s-%03d' % ('a', 5) }} {{ '{}'.format([1, 2]) }}
{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages[0] | tojson }} {{ missing }}{{ missing is defined }} {{ ('a', 'b') }} {{ {'x': [1, none, true]} }}
{% for key, value in {'b': 1, 'a': 2} | dictsort %}{{ loop.index }}/{{ loop.length }}{{ key }}={{ value }};{% endfor %}
{{ ' x ' | trim | replace('x', 'yy') | center(8) }}|{{ 'a b'.split(' ')[::-1] }}
{{ range(3) | sum }} {{ [3, 1] | sort }}
{% set block %}in {{ 'a' }} block{% endset %}{{ block | length }}{% filter upper %}{{ block }}{% endfilter %}
{{ 'x' in 'xyz' and 'user' in messages | map(attribute='role') | list }}
{{ 'c' if messages == [] else 'd' }} {{ 1 < 2 < 3 }}
"""
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello <b>\u00e9\U0001f600 "},
    {"role": "tool", "content": "none"},
    {"role": "assistant", "content": "Hi."},
]
# The template of gpt-oss uses macros that call themselves, the date, builtin tools, and turns with tool calls.
HARMONY = """
{%- macro kind(spec, required) -%}
    {%- if spec.type == 'array' -%}{{ kind(spec['items'], required or []) + '[]' }}
    {%- elif spec.type == 'object' -%}
        {{- '{' }}
        {%- for name, part in spec.properties.items() -%}
            {{ name }}{{ '?' if name not in (spec.required or []) }}: {{ kind(part, []) }}
            {%- if not loop.last %}{{ ', ' }}{% endif -%}
        {%- endfor -%}
        {{- '}' }}
    {%- elif spec.enum is defined -%}{{ '"' + spec.enum|join('" | "') + '"' }}
    {%- else -%}{{ spec.type if spec.type is string else 'any' }}{%- endif -%}
{%- endmacro -%}
{%- macro builtin(browser, python) -%}
    {%- if browser %}{{- 'namespace browser {' + '}\n' }}{% endif -%}
    {%- if python %}{{- '## python\n' }}{% endif -%}
{%- endmacro -%}
{%- if builtin_tools is defined and builtin_tools is not none %}
    {%- set chosen = namespace(browser=false, python=false) %}
    {%- for tool in builtin_tools %}{% if tool == 'browser' %}{% set chosen.browser = true %}{% endif %}{% endfor %}
{%- endif %}
{{- '<|start|>system<|message|>Today is ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' }}
{{- reasoning_effort if reasoning_effort is defined else 'medium' }}
{%- if chosen is defined %}{{ builtin(chosen.browser, chosen.python) }}{% endif %}
{%- for tool in tools %}{{ 'type ' + tool.name + ' = (_: ' + kind(tool.parameters, none) + ') => any;\n' }}{% endfor %}
{{- '<|end|>' }}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|message|>' + call.arguments|tojson + '<|call|>' }}
    {%- elif loop.last and not add_generation_prompt %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt }}"""
TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "places": {"type": "array", "items": {"type": "string"}},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["places"],
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1]}}}],
}
TEMPLATES = {"features": FEATURES, "harmony": HARMONY} | {
    name: text for name in MODELS if (text := template_of(name))
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:2], [TURNS[1], TURNS[3]] * 40, [TURNS[1], CALL]])
def test_a_template_gives_the_text_of_the_sandbox(name, turns):
    variables = {"messages": turns, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    variables |= {"tools": [TOOL], "builtin_tools": ["browser"], "strftime_now": lambda form: "2025-06-28"}
    bounded, sandbox = (
        environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        .from_string(TEMPLATES[name])
        .render(variables)
        for environment in (BoundedEnvironment, ImmutableSandboxedEnvironment)
    )
    assert bounded == sandbox != ""


CONVERSATIONS = {
    "10,000 turns": [{"role": role, "content": "hello </s> {} %s"} for role in ("user", "assistant")] * 5000,
    "one long turn": [{"role": "user", "content": "x" * 7_000_000}],
}
OPERATIONS = {
    "usual": "{% for m in messages %}{% if m.role == 'user' and loop.index0 < messages | length %}"
    "{{ '<|user|>\\n' + m.content | trim + '<|end|>\\n' }}{% else %}"
    "{{ '<|assistant|>\\n' ~ m['content'].split('</think>')[-1].strip() ~ '<|end|>\\n' }}{% endif %}{% endfor %}",
    "replace": "{% for m in messages %}{{ m.content | replace('<|im_end|>', '&lt;im_end&gt;') }}{% endfor %}",
    "join": "{{ messages | map(attribute='content') | join('\\n<|end|>\\n') }}",
    "format": "{% for m in messages %}{{ '<{}>{{}}{:>9}'.format(m.content, 1) }}{% endfor %}",
    "searches": "{% for m in messages %}{{ m.content.rstrip('\\n ').rsplit('</think>', 1)[-1] }}"
    "{{ m.content.rfind('</s>', 3) if '<tool>' not in m.content }}{% endfor %}",
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_long_conversation_is_within_the_limit(conversation, operation):
    bounded, sandbox = (
        environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(OPERATIONS[operation])
        .render(messages=CONVERSATIONS[conversation])
        for environment in (BoundedEnvironment, ImmutableSandboxedEnvironment)
    )
    assert bounded == sandbox


def test_transformers_renders_templates_without_limits_outside_of_the_context():
    source = "{{ ('x' * 10**5) | length }}" + "{# a comment #}" * 10_000
    for _ in range(2):
        with bounded_templates(), pytest.raises(TemplateError, match="characters: expected at most"):
            chat_template_utils.render_jinja_template([TURNS], chat_template=source)
        assert chat_template_utils.render_jinja_template([TURNS], chat_template=source)[0] == ["100000"]


def test_templates_in_the_context_have_the_filters_of_transformers():
    source = "{{ messages | tojson }}{{ strftime_now('%Y') }}{% generation %}<b>{% endgeneration %}"
    with bounded_templates():
        bounded = chat_template_utils.render_jinja_template([TURNS], chat_template=source)
    assert bounded == chat_template_utils.render_jinja_template([TURNS], chat_template=source)
