"""Chat templates that must be refused."""

from __future__ import annotations

LONG = "{% set x = ('x' * 1000) | replace('x', 'x' * 1000) %}"


SLOW_METHODS = {
    "rfind": "x.rfind(y)",
    "rindex": "(x ~ y).rindex(y)",
    "rsplit": "x.rsplit(y)",
    "rpartition": "x.rpartition(y)",
    "strip": "x.strip('y' * 10**5 ~ x[0])",
    "lstrip": "x.lstrip('y' * 10**5 ~ x[0])",
    "rstrip": "x.rstrip('y' * 10**5 ~ x[0])",
    "trim": "x | trim('y' * 10**5 ~ x[0])",
}


HOSTILE = {
    **{
        f"the search {name}": LONG + "{% set y = 'xy' ~ 'x' * 10**5 %}{% for i in range(99999) %}"
        "{% set z = " + text + " %}{% endfor %}"
        for name, text in SLOW_METHODS.items()
    },
    **{
        f"the filter {name} in a loop": "{% set x = 'ab ' * 300000 %}{% for i in range(99999) %}{% set y = x | "
        f"{name}"
        " %}{% endfor %}"
        for name in ("title", "wordcount", "select | join")
    },
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
    "the method join of a generator": "{{ ('x' * 10**5).join(range(99999) | map('string')) }}",
    "texts of long numbers": "{{ [2 ** 14000] * 10 ** 6 }}",
    "a width by *": "{{ '%*d' % (10**8, 1) }}",
    "a precision by *": "{{ '%.*f' % (10**8, 1) }}",
    "a precision": "{{ '%.1000000000f' % 1 }}",
    "a width after nested parentheses": "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "a nested width": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10**8}) }}",
    "a nested width of an item": "{{ '{0[0]:{0[1]}}'.format([1, 10**8]) }}",
    "many fields": "{{ ('%s' * 10**4) | format('x' * 10**5) }}",
    "loops of searches": LONG + "{% for i in range(99999) %}{% if 'y' in x %}{% endif %}{% endfor %}",
    "loops of slices": LONG + "{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "loops of tests": LONG
    + "{% for i in range(99999) %}{% if 'xxxxxxxxxxxxy' is in x %}{% endif %}{% endfor %}",
    "loops of changed": LONG
    + "{% for i in range(99999) %}{% if loop.changed(x[0:] ~ i) %}{% endif %}{% endfor %}",
    "loops of changed with one list": "{% set x = range(99999) | list %}{% for i in range(99999) %}"
    "{% if loop.changed(x) %}{% endif %}{% endfor %}",
    "loops of count": "{% set x = range(99999) | list %}{% for i in range(99999) %}"
    "{% if x.count(-1) %}{% endif %}{% endfor %}",
    "loops of items": "{% set x = {'a': range(99999) | list} %}{% for i in range(99999) %}"
    "{% if x.items() == x.items() %}{% endif %}{% endfor %}",
    "loops of a long key": "{% set x = ('a', 'b') * 10**5 %}{% for i in range(99999) %}"
    "{% if {}[x] %}{% endif %}{% endfor %}",
    "lipsum": "{{ lipsum(10**6) }}",
    "a codec": "{{ 'x'.encode('punycode') }}",
    "its own length": "x" * 100_000,
}
