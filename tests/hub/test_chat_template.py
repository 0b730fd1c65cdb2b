"""Chat templates whose work is bounded: they give the text of Jinja's sandbox, and hostile ones are refused at once."""

from __future__ import annotations

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mars_jax.hub.chat_template import BoundedEnvironment
from mars_jax.specs.models import MODELS, template_of

HOSTILE = {
    "a text times a number": "{{ 'x' * 10**10 }}",
    "a number times a text": "{{ 10**10 * 'x' }}",
    "a list times a number": "{{ [1] * 10**10 }}",
    "a power": "{{ 9 ** 100000000 }}",
    "squares of a number": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "the filter center": "{{ 'x' | center(10**10) }}",
    "the filter replace": "{{ ('x' * 10**5) | replace('x', 'y' * 10**5) }}",
    "the filter join": "{{ range(99999) | join('x' * 10**5) }}",
    "the filter join of a generator": "{{ range(99999) | map('string') | join('x' * 10**5) }}",
    "the filter indent": "{{ ('\\n' * 10**5) | indent(10**5, true) }}",
    "the filter format": "{{ '%10000000000d' | format(1) }}",
    "the filter tojson": "{{ [[]] | tojson(indent=10**9) }}",
    "the filter map": "{{ range(99999) | map('center', 80000) | list | length }}",
    "the filter batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "the filter sum": "{{ ([[1]] * 400000) | sum(start=[]) | length }}",
    "the filter wordwrap": "{{ ('x ' * 10**6) | wordwrap(2, wrapstring='y' * 10**5) }}",
    "the operator %": "{{ '%10000000000d' % 1 }}",
    "the method ljust": "{{ 'x'.ljust(10**10) }}",
    "the method zfill": "{{ '1'.zfill(10**10) }}",
    "the method expandtabs": "{{ ('\\t' * 10**5).expandtabs(10**5) }}",
    "the method replace": "{{ ('x' * 10**5).replace('x', 'y' * 10**5) }}",
    "the method join": "{{ ('x' * 10**5).join(['a'] * 10**5) }}",
    "the method format": "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "the method format by its width": "{{ '{:10000000000}'.format(1) }}",
    "the method format_map": "{{ ('{a}' * 10**5).format_map({'a': 'x' * 10**5}) }}",
    "the method translate": "{{ ('a' * 10**5).translate({97: 'x' * 10**5}) }}",
    "the method to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a condition of a loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{{ 'x' * 200 }}{% endfor %}",
    "a text doubled by ~": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "a text doubled by +": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "a list that holds itself twice": "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "a namespace that holds itself twice": "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a block": "{% set b %}{% for i in range(99999) %}{{ 'x' * 10**5 }}{% endfor %}{% endset %}",
    "searches": "{% set x = 'x' * 8000000 %}{% for i in range(99999) %}{% if 'y' in x %}{% endif %}{% endfor %}",
    "slices": "{% set x = 'x' * 8000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "its own length": "x" * 100_000,
}
SLOW = {
    "the filter sum",
    "a list that holds itself twice",
    "a namespace that holds itself twice",
    "a macro that calls itself twice",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in HOSTILE]
)
def test_a_hostile_template_is_refused_by_its_limit(name):
    environment = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    with pytest.raises(
        TemplateError, match=r"more than [\d,]+ (characters and steps|bits)|expected at most [\d,]+$"
    ):
        environment.from_string(HOSTILE[name]).render(messages=[])


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
TEMPLATES = {"features": FEATURES} | {name: text for name in MODELS if (text := template_of(name))}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:2], [TURNS[1], TURNS[3]] * 40])
def test_a_template_gives_the_text_of_the_sandbox(name, turns):
    texts = []
    for environment in (BoundedEnvironment, ImmutableSandboxedEnvironment):
        made = environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        variables = {
            "messages": turns,
            "add_generation_prompt": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
        }
        texts.append(made.from_string(TEMPLATES[name]).render(**variables))
    assert texts[0] == texts[1] != ""


def test_a_long_conversation_is_within_the_limit():
    """Ten thousand turns, and one turn of 7 MB, through every kind of operation that usual templates have."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        "{% for m in messages %}{% if m.role == 'user' and loop.index0 < messages | length %}"
        "{{ '<|user|>\\n' + m.content | trim + '<|end|>\\n' }}{% else %}"
        "{{ '<|assistant|>\\n' ~ m['content'].split('</think>')[-1].strip() ~ '<|end|>\\n' }}{% endif %}{% endfor %}"
    )
    many = [{"role": role, "content": "hello " * 10} for role in ("user", "assistant")] * 5000
    assert template.render(messages=many).count("hello") == 100_000
    one = [{"role": "user", "content": "x" * 7_000_000}]
    assert len(template.render(messages=one)) == 7_000_000 + len("<|user|>\n<|end|>\n")
