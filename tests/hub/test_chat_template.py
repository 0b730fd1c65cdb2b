"""Bounded chat templates: they render the same text as Jinja's sandbox, and hostile ones are refused quickly."""

import time

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from mars_jax.hub import chat_template
from mars_jax.hub.chat_template import BoundedEnvironment, bounded_templates
from mars_jax.utils.catalogue import MODELS, template_of
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
# Features of the published template of gpt-oss: macros that call themselves and have defaults, types of JSON schemas,
# the date, and turns that call tools, whose reasoning depends on later turns.
HARMONY = """
{%- macro kind(spec, required=[], is_nullable=false) -%}
    {%- if spec.type == 'array' -%}
        {{- kind(spec['items'], required or []) + '[]' if spec['items'] else 'any[]' }}
        {%- if spec.nullable or is_nullable -%}{{- ' | null' }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {{- spec.type | join(' | ') if spec.type[0] is defined }}
    {%- elif spec.oneOf -%}
        {%- for variant in spec.oneOf -%}
            {{- kind(variant) }}{%- if variant.default is defined %}{{ '// ' + variant.default|tojson }}{% endif -%}
            {%- if not loop.last %}{{- ' | ' }}{% endif -%}
        {%- endfor -%}
    {%- elif spec.properties -%}
        {{- '{\n' }}
        {%- for name, part in spec.properties.items() -%}
            {{ name }}{{ '?' if name not in (spec.required or []) }}: {{ kind(part, spec.required or []) }}
        {%- endfor -%}
        {{- '}' }}
    {%- else -%}{{ '"' + spec.enum|join('" | "') + '"' if spec.enum else spec.type }}{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' + reasoning_effort }}
{%- for tool in tools %}
    {%- set tool = tool.function %}
    {{- 'type ' + tool.name + ' = ' }}{{ kind(tool.parameters) if tool.parameters else '() => any;' }}
{%- endfor %}
{%- set last_call = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set final = namespace(found=false) %}
        {%- for later in messages[loop.index:] if later.role == 'assistant' %}{% set final.found = true %}{% endfor %}
        {%- set call = message.tool_calls[0].function %}{% set last_call.name = call.name %}
        {{- message.thinking if not final.found }}{{ ' to=functions.' + call.name }}{{ call.arguments|tojson }}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception('no call') }}{%- endif %}
        {{- '<|start|>functions.' + last_call.name + '<|message|>' + message.content|tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
PROPERTIES = {
    "places": {"type": "array", "items": {"type": "string"}, "nullable": True},
    "unit": {"type": "string", "enum": ["C", "F"]},
    "day": {"oneOf": [{"type": "integer", "default": 0}, {"properties": {}}]},
    "either": {"type": ["string", "null"]},
    "nested": {"properties": {"x": {"type": "array"}}, "required": ["x"]},
}
WEATHER = {"name": "weather", "parameters": {"properties": PROPERTIES, "required": ["places"]}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, {"name": "clock"})]
CALL = {"role": "assistant", "content": "", "thinking": "I need f."}
CALL |= {"tool_calls": [{"function": {"name": "f", "arguments": {"x": [1]}}}]}
TEMPLATES = {"features": FEATURES, "harmony": HARMONY} | {
    name: text for name in MODELS if (text := template_of(name))
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "turns", [TURNS, TURNS[1:2], [TURNS[1], TURNS[3]] * 40, [TURNS[1], CALL, *TURNS[2:]]]
)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_template_gives_the_text_of_the_sandbox(name, turns, prompt):
    variables = {"messages": turns, "add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
    variables |= {"tools": TOOLS, "builtin_tools": ["browser"]}
    if prompt:
        variables["reasoning_effort"] = "high"

    def render():
        try:
            return chat_template_utils._compile_jinja_template(TEMPLATES[name]).render(variables)
        except TemplateError as error:
            return str(error)

    expected = render()
    with bounded_templates():
        assert render() == expected != ""


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
