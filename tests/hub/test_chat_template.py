"""Bounded chat templates: they render the same text as Jinja's sandbox, and hostile ones are refused quickly."""

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
# The features of the published template of gpt-oss, in other words: macros that call themselves and have defaults,
# types of JSON schemas in TypeScript notation, the date, the reasoning effort, builtin tools, channels, and turns that
# call tools, whose reasoning depends on later turns.
HARMONY = """
{%- macro kind(spec, required, is_nullable=false) -%}
    {%- if spec.type == 'array' -%}
        {%- set inner = kind(spec['items'], required or []) if spec['items'] else 'any' -%}
        {{- 'any[]' if inner == 'object | object' or inner|length > 50 else inner + '[]' }}
        {%- if spec.nullable or is_nullable -%}{{- ' | null' }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping
        and spec.type[0] is defined -%}
        {{- spec.type | join(' | ') if spec.type | length > 1 else spec.type[0] }}
    {%- elif spec.oneOf -%}
        {%- set has_objects = false -%}
        {%- for variant in spec.oneOf -%}
            {%- if variant.type == 'object' -%}{%- set has_objects = true -%}{%- endif -%}
            {{- kind(variant, required) -}}
            {%- if variant.description %}{{- '// ' + variant.description }}{%- endif -%}
            {%- if variant.default is defined %}{{ '// default: ' + variant.default|tojson }}{%- endif -%}
            {%- if not loop.last %}{{- ' | ' }}{% endif -%}
        {%- endfor -%}
        {{- has_objects }}
    {%- elif spec.type == 'object' -%}
        {{- '{\n' }}
        {%- for name, part in spec.properties.items() -%}
            {{ name }}{{ '?' if name not in (spec.required or []) }}: {{ kind(part, spec.required or []) }}
            {%- if not loop.last %}{{ ', ' }}{% endif -%}
        {%- endfor -%}
        {{- '}' }}
    {%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- else -%}{{ spec.type if spec.type is string else 'any' }}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(space, tools) -%}
    {{- '## ' + space + '\n\nnamespace ' + space + ' {\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- 'type ' + tool.name + ' = ' }}
        {%- if tool.parameters and tool.parameters.properties %}
            {%- for name, spec in tool.parameters.properties.items() %}
                {{- name + ': ' + kind(spec, tool.parameters.required or []) }}
                {%- if spec.default is defined %}{{- ', // default: ' + spec.default|tojson }}{%- endif %},
            {%- endfor %}
        {%- else -%}{{- '() => any;' }}{%- endif -%}
    {%- endfor %}
    {{- '} // namespace ' + space }}
{%- endmacro -%}
{%- macro builtin(browser, python) -%}
    {%- if browser %}{{- 'namespace browser {' + '}\n' }}{% endif -%}
    {%- if python %}{{- '## python\n【6†L9-L11】 `[{cursor}]`' }}{% endif -%}
{%- endmacro -%}
{%- macro system() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
    {{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' + reasoning_effort }}
    {%- if builtin_tools %}
        {%- set chosen = namespace(browser=false, python=false) %}
        {%- for tool in builtin_tools %}{% if tool == 'browser' %}{% set chosen.browser = true %}{% endif %}{% endfor %}
        {{- builtin(chosen.browser, chosen.python) }}
    {%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>' }}{{- system() }}{{- '<|end|>' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {%- set developer_message, turns = messages[0].content, messages[1:] %}
{%- else %}{%- set developer_message, turns = '', messages %}{%- endif %}
{%- if developer_message or tools %}
    {{- '<|start|>developer<|message|>' + developer_message + namespace_of('functions', tools) + '<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in turns -%}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set final = namespace(found=false) %}
        {%- for later in turns[loop.index:] %}
            {%- if later.role == 'assistant' and 'tool_calls' not in later %}{%- set final.found = true %}{%- endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0] %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {%- if message.thinking and not final.found %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary ' }}
        {{- (call.content_type if call.content_type is defined else 'json') + '<|message|>' }}
        {{- call.arguments|tojson }}{{- '<|call|>' }}
        {%- set last_call.name = call.name %}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception('no call') }}{%- endif %}
        {{- '<|start|>functions.' + last_call.name + ' to=assistant<|message|>' + message.content|tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
PROPERTIES = {
    "places": {"type": "array", "items": {"type": "string"}, "nullable": True},
    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
    "day": {
        "oneOf": [
            {"type": "integer", "description": "from 0", "default": 0},
            {"type": "object", "properties": {}},
        ]
    },
    "either": {"type": ["string", "null"]},
    "nested": {"type": "object", "properties": {"x": {"type": "array"}}, "required": ["x"]},
}
WEATHER = {"name": "weather", "parameters": {"properties": PROPERTIES, "required": ["places"]}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, {"name": "clock"})]
CALL = {
    "role": "assistant",
    "content": "",
    "thinking": "I need f.",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1]}}}],
}
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
