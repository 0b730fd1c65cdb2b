"""Chat templates that must be rejected."""

LONG = "{% set x = ('x' * 1000) | replace('x', 'x' * 1000) %}"
HOSTILE = {
    "a search": LONG + "{{ x.rfind('xy' ~ 'x' * 10**5) }}",
    "a slow filter in a loop": LONG + "{% for i in range(99999) %}{% set y = x | title %}{% endfor %}",
    "a text times a number": "{{ 'x' * 10**10 }}",
    "a list times a number": "{{ [1] * 10**10 }}",
    "a power": "{{ 9 ** 100000000 }}",
    "squares of a number": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "texts of long numbers": "{{ [2 ** 14000] * 10 ** 6 }}",
    "the filter center": "{{ 'x' | center(10**10) }}",
    "the filter replace": "{{ ('x' * 10**5) | replace('x', 'y' * 10**5) }}",
    "the filter join of a generator": "{{ range(99999) | map('string') | join('x' * 10**5) }}",
    "the filter tojson": "{{ [[]] | tojson(indent=10**9) }}",
    "the filter map": "{{ range(99999) | map('center', 80000) | list | length }}",
    "the filter batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "the filter sum": "{{ ([[1]] * 400000) | sum(start=[]) | length }}",
    "the operator %": "{{ '%10000000000d' % 1 }}",
    "a width by *": "{{ '%*d' % (10**8, 1) }}",
    "many fields": "{{ ('%s' * 10**4) | format('x' * 10**5) }}",
    "the method ljust": "{{ 'x'.ljust(10**10) }}",
    "the method join": "{{ ('x' * 10**5).join(['a'] * 10**5) }}",
    "the method format": "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "a nested width": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10**8}) }}",
    "the method translate": "{{ ('a' * 10**5).translate({97: 'x' * 10**5}) }}",
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a condition of a loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}" + "x" * 2000 + "{% endfor %}",
    "a text doubled by ~": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "a text doubled by +": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "a list that holds itself twice": "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "loops of slices": LONG + "{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "lipsum": "{{ lipsum(10**6) }}",
    "a codec": "{{ 'x'.encode('punycode') }}",
    "its own length": "x" * 100_000,
}
