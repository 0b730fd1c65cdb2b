"""Resource limits for chat templates, which are programs written by the author of a checkpoint.

transformers runs them in Jinja's sandbox. The sandbox protects Python's internals but limits neither memory nor time:
`{{ 'x' * 10**10 }}` takes 10 GB, and three nested loops over `range(99999)` never finish. `BoundedEnvironment` limits
the CPU time of each rendering, the total size of the values that it creates, and the size of the operands of each
operation. Tested against Jinja's own sandbox (tests/hub/test_chat_template.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mars_jax.utils.limits import PROMPT_BYTES, TEMPLATE_BYTES, TEMPLATE_SECONDS, TEMPLATE_SIZE

_NUMBER_BITS = 1 << 16
"""Maximum size of an integer in bits. The time of a multiplication grows with the square of the size."""
_ITEM = 64
"""Size in characters that `_size` assigns to each value other than a string."""
_COUNT = 1 << 24
"""Largest integer that a template may use as a repeat count or a width."""
_LINEAR = (
    *("startswith", "endswith", "find", "index", "count", "split", "partition"),
    *("removeprefix", "removesuffix", "default", "d", "truncate", "map", "select", "reject"),
    *("selectattr", "rejectattr", "sort", "unique", "groupby", "dictsort"),
)
"""Methods and filters whose operands need no limit, because the result is at most as large as the operands."""
_REFUSED = (
    *("encode", "decode", "generate_lorem_ipsum"),
    *("pprint", "urlize", "striptags", "xmlattr", "wordwrap"),
)
"""Functions and filters that may take unbounded time even for small arguments."""
_WIDTH = re.compile(r"\d{7,}|%[-+ #0]*[\d.]*\*|\{[^{}]*:[^{}]*\{")
"""Pattern for a format string with a field width of a million or more, or with a width that is itself an argument."""


def _size(value: object) -> int:
    """Return the size of a nested value in characters; an item that occurs twice counts twice."""
    # Use a loop instead of recursion, because a template can nest lists deeper than Python's recursion limit.
    size, pending = 0, [value]
    while pending and size <= TEMPLATE_SIZE:
        item = pending.pop()
        if isinstance(item, str | bytes):
            size += len(item)
            continue
        size += _ITEM
        if isinstance(item, Namespace):
            item = item._Namespace__attrs  # type: ignore[attr-defined]
        if isinstance(item, int):
            size += item.bit_length()
            if item.bit_length() > _NUMBER_BITS:
                raise TemplateError(f"it computes a number of more than {_NUMBER_BITS:,} bits")
        elif isinstance(item, Mapping):
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, Sequence | MappingView):  # for example, a range
            size += _ITEM * len(item)
    return size


def _factor(operand: object) -> int:
    """Return the factor by which an operand may enlarge a result: its absolute value if it is an int, else its size."""
    if not isinstance(operand, int):
        return _size(operand)
    if abs(operand) > _COUNT:
        return 2 * TEMPLATE_SIZE + 1  # more than `_check` allows
    return abs(operand)


class _Hooks(NodeTransformer):
    """A node transformer that adds filters where the environment has no hook: to literals, `~`, loops and macros."""

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        # The targets of an assignment, as in `{% set a, b = pair %}`, are also parsed as a tuple node, but this node
        # creates no value.
        if getattr(node, "ctx", "load") == "store":
            return node
        return _filtered(node, " new")

    visit_Dict = visit_Tuple = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        # Rewrite `a ~ b` as `[a, b]|join`, because the environment wraps every filter but has no hook for `~`.
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "join")

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        # Insert an empty output at the start of the body, to check the time in every iteration or call.
        empty = nodes.Const("", lineno=node.lineno)
        node.body.insert(0, nodes.Output([_filtered(empty, " new")], lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # A constant's length counts towards the limit.
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Expr, name: str) -> nodes.Node:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)


class _Template(Template):
    def render(self, *args: Any, **variables: Any) -> str:
        self.environment._start()  # type: ignore[attr-defined]
        text = super().render(*args, **variables)
        if (size := len(text.encode("utf-8", "surrogatepass"))) > PROMPT_BYTES:
            raise TemplateError(f"it writes {size:,} bytes: expected at most {PROMPT_BYTES:,}")
        return text


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with time and memory limits, for one template and one thread at a time."""

    template_class = _Template
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def compile(self, source: str, *args: Any, **options: Any) -> Any:  # pyright: ignore
        """Compile a template after inserting the hooks."""
        if len(source) > TEMPLATE_BYTES:
            raise TemplateError(f"it has {len(source):,} characters: expected at most {TEMPLATE_BYTES:,}")
        self.finalize = pass_context(lambda context, value: self._new(value))
        # Assign a new dict, because the current one is shared with transformers' environment.
        self.filters = {name: self._limited(function, name) for name, function in self.filters.items()}
        # Make the filter take the context, which keeps Jinja from folding constants at compile time.
        self.filters[" new"] = pass_context(lambda context, value: self._new(value))
        self._start()
        return super().compile(_Hooks().visit(self.parse(source)), *args, **options)

    def _start(self) -> None:
        self._remaining, self._deadline = TEMPLATE_SIZE, time.thread_time() + TEMPLATE_SECONDS

    def _new(self, value: Any) -> Any:
        """Subtract the size of a new value from the size that remains allowed, check the time, and return the value."""
        self._remaining -= _size(value)
        if self._remaining < 0:
            raise TemplateError(f"its values have more than {TEMPLATE_SIZE:,} characters")
        if time.thread_time() > self._deadline:
            raise TemplateError(f"it takes more than {TEMPLATE_SECONDS} seconds")
        return value

    def _check(self, name: str, value: object, arguments: Sequence[object]) -> None:
        """Raise TemplateError if the operation is unsupported, or if the product of the operands' sizes exceeds the
        limit."""
        if name in _REFUSED:
            raise TemplateError(f"{name} is not supported")
        if (
            name in ("%", "format", "format_map")
            and isinstance(value, str)
            and _WIDTH.search(value.replace("%%", ""))
        ):
            raise TemplateError("the width of a field is an argument or in the millions")
        # On lists, `sum` copies the running total at every step, so its time is quadratic in the size of the result.
        if name == "sum":
            arguments = [value, *arguments]
        if name not in _LINEAR and arguments:
            # `join` writes the separator once per item, so only the number of items matters.
            if name == "join" and isinstance(value, Sequence):
                value = len(value)
            product = max(1, _factor(value)) * sum(map(_factor, arguments))
            if product > 2 * TEMPLATE_SIZE:
                raise TemplateError(f"the operands of {name} multiply to more than {2 * TEMPLATE_SIZE:,}")

    def _limited(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a filter so that its operands are checked and its result counts towards the limit."""
        # Index of the filtered value among the arguments: 1 if the context precedes it, otherwise 0.
        first = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def limited(*args: Any, **options: Any) -> Any:
            value, *arguments = args[first:]
            if isinstance(value, Iterator):
                value = list(value)
            self._check(name, value, [*arguments, *options.values()])
            return self._new(function(*args[:first], value, *arguments, **options))

        return limited

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator after checking its operands."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        # `a ** b` has about b times as many bits as a. Check before computing it; `_new` checks all other results.
        if numbers and operator == "**" and isinstance(left, int):
            if left.bit_length() * max(right, 0) > _NUMBER_BITS:
                raise TemplateError(f"it computes a number of more than {_NUMBER_BITS:,} bits")
        elif not numbers and operator != "+":
            self._check(operator, left, [right])
        return self._new(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:  # pyright: ignore
        """Call a function, a macro, or a method after checking its arguments."""
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `str.format`
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name in _REFUSED or isinstance(owner, str | bytes | int):
            # Turn iterators into lists, because measuring an iterator would consume it. For `separator.join(items)`,
            # check `items` as the value and `separator` as its argument.
            args = tuple(list(item) if isinstance(item, Iterator) else item for item in args)
            value, *arguments = (args[0], owner) if name == "join" and args else (owner, *args)
            named = [item for key, item in options.items() if key not in ("_loop_vars", "_block_vars")]
            self._check(name, value, [*arguments, *named])
        return self._new(super().call(context, function, *args, **options))


@functools.lru_cache(maxsize=16)
def _compiled(compile_template: Callable[[str], Template], source: str) -> Template:
    """Compile a template with the filters, extensions and globals of transformers' environment."""
    environment = compile_template("").environment.overlay()
    environment.__class__ = BoundedEnvironment
    return environment.from_string(source)


_replacing = threading.RLock()


@contextlib.contextmanager
def bounded_templates() -> Iterator[None]:
    """Make transformers render chat templates in a `BoundedEnvironment`, one thread at a time.

    Inside the `with` block, a private function of transformers is replaced, because it has no parameter for an
    environment.
    """
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    with _replacing:
        compile_template = module._compile_jinja_template
        module._compile_jinja_template = functools.partial(_compiled, compile_template)
        try:
            yield
        finally:
            module._compile_jinja_template = compile_template
