"""Bounds on chat templates, which are programs of a checkpoint's author that transformers runs in Jinja's sandbox.

The sandbox keeps a template from reaching Python, but not from taking all memory and time: `{{ 'x' * 10**10 }}` is 10
GB, and three nested loops over `range(99999)` do not end. `BoundedEnvironment` counts the work of a rendering in
characters and items, and stops it after `TEMPLATE_WORK`. An operation whose result may be the product of its operands
is refused before it runs. Oracle: the sandbox itself (tests/hub/test_chat_template.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mars_jax.core.limits import PROMPT_BYTES, TEMPLATE_BYTES, TEMPLATE_WORK

_STEP, _ITEM, _NODE = 256, 128, 4
"""Work of an operation, of an item in a list, and of a node of a loop's or macro's body each time that it runs. They
take the time of about so many characters."""
_NUMBER_BITS = 1 << 16
"""Bits of a whole number. Products of longer ones take time that grows with the square."""
_LINEAR = (
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "split", "rsplit", "partition"),
    *("rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "default", "d"),
)
"""Methods and filters whose time and result are at most the sum of their operands."""
_QUADRATIC = ("sum", "striptags", "urlize", "wordwrap", "xmlattr", "pprint")
"""Filters whose time or result may grow with the square of the input."""

_left: contextvars.ContextVar[int | None] = contextvars.ContextVar("left", default=None)
"""Work that the current rendering has left; None outside of one."""


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    """Give a rendering, or a compilation, which computes constants, its work."""
    token = _left.set(TEMPLATE_WORK)
    try:
        yield
    finally:
        _left.reset(token)


def _check(work: int) -> None:
    """Raise TemplateError if less work is left."""
    left = _left.get()
    if left is not None and work > left:
        raise TemplateError(
            f"it takes more than {TEMPLATE_WORK:,} characters and steps, the limit of a template"
        )


def _spend(work: int) -> None:
    _check(work)
    left = _left.get()
    if left is not None:
        _left.set(left - work)


def _size(value: Any) -> int:
    """Return the work of a value: its characters and items, at all depths, where a list that is in another twice
    counts twice, as in its text.

    Raises:
      TemplateError: less work is left.
    """
    size, pending = 0, [value]
    while pending:
        one = pending.pop()
        size += _ITEM
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            pending += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            pending += one
        elif isinstance(one, Namespace):
            pending.append(one._Namespace__attrs)  # type: ignore[attr-defined]
        elif isinstance(one, Sequence):  # a range
            size += _ITEM * len(one)
        elif isinstance(one, int) and one.bit_length() > _NUMBER_BITS:
            raise TemplateError(f"it computes a number of more than {_NUMBER_BITS:,} bits")
        _check(size)
    return size


def _length(value: Any) -> int:
    """Return the work of a value without what is inside of its items, which takes no time."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, Mapping | Sequence) else 0


def _check_product(value: Any, arguments: Sequence[Any], name: str = "") -> None:
    """Raise TemplateError if less work is left than the product of a value's size and its arguments, which multiply
    it as counts (`*`), widths (`center`) or texts (`replace`)."""
    factor = sum(abs(one) if isinstance(one, int) else _size(one) for one in arguments)
    if name in ("%", "format", "format_map"):  # the width in "%1000000d" is no argument
        factor += max((int(digits[:20]) for digits in re.findall(r"\d+", str(value))), default=0)
    if name in _QUADRATIC:
        factor += _size(value)
    if factor and name not in _LINEAR:
        _check(_size(value) * factor)


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a filter so that it counts its work; compiled templates call all filters through the wrapped ones."""
    first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        value, *others = args[first:]
        if isinstance(value, Iterator) and others:
            value = list(value)  # whose size is known
        if name not in ("length", "count"):
            _spend(_length(value))
        _check_product(value, [*others, *options.values()], name)
        return _new(function(*args[:first], value, *others, **options))

    return counted


def _test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        _spend(_STEP)
        return function(*args)

    return counted


def _new(value: Any, work: int = 0) -> Any:
    """Count a new value, and return it."""
    _spend(_STEP + work + (0 if _left.get() is None else _size(value)))
    return value


# With the context as an argument, Jinja does not compute them when it compiles.
@pass_context
def _value(context: Any, value: Any, work: int = 0) -> Any:
    return _new(value, work)


@pass_context
def _joined(context: Any, values: list[Any]) -> str:
    """Return `a ~ b ~ c`, counted before the parts are put together."""
    texts = [str(_new(value)) for value in values]
    _spend(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _printed(context: Any, value: Any) -> str:
    text = str(_new(value))
    _spend(len(text))
    return text


class _Counting(NodeTransformer):
    """Adds filters that count to the syntax tree: where it makes or compares values, repeats a body, or prints."""

    def _filtered(self, node: Any, name: str, *arguments: int) -> Any:
        constants: list[nodes.Expr] = [nodes.Const(one) for one in arguments]
        return nodes.Filter(node, name, constants, [], None, None).set_lineno(node.lineno)

    def visit_List(self, node: Any) -> Any:
        return self._filtered(self.generic_visit(node), " value")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> Any:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> Any:
        return self.visit_List(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), " joined")

    def visit_Compare(self, node: nodes.Compare) -> Any:
        self.generic_visit(node)
        for operand in (node, *node.ops):
            operand.expr = self._filtered(operand.expr, " value")
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        node.nodes = [self._filtered(one, " printed") for one in node.nodes]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> Any:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: Any) -> Any:
        work = _NODE * sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        start = self._filtered(nodes.Const("", lineno=node.lineno), " value", work)
        node.body.insert(0, nodes.Output([start], lineno=node.lineno))
        if getattr(node, "test", None) is not None:  # which also runs for items that the body does not see
            node.test = self._filtered(node.test, " value", work)
        return node

    visit_Macro = visit_CallBlock = visit_For


class _Template(Template):
    def render(self, *args: Any, **variables: Any) -> str:
        with _counting():
            text = super().render(*args, **variables)
        if (size := len(text.encode("utf-8", "surrogatepass"))) > PROMPT_BYTES:
            raise TemplateError(f"it writes {size:,} bytes: expected at most {PROMPT_BYTES:,}")
        return text


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on work. Templates give the text that they give in the sandbox itself."""

    template_class = _Template
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def compile(self, source: Any, *args: Any, **options: Any) -> Any:
        """Compile a template whose syntax tree counts its work."""
        if isinstance(source, str):
            if len(source) > TEMPLATE_BYTES:
                raise TemplateError(f"it has {len(source):,} characters: expected at most {TEMPLATE_BYTES:,}")
            source = _Counting().visit(self.parse(source))
        # An environment of transformers compiles one template, after it has got its filters.
        self.filters = {name: _counted(function, name) for name, function in self.filters.items()}
        self.filters |= {" value": _value, " joined": _joined, " printed": _printed}
        self.tests = {name: _test(function) for name, function in self.tests.items()}
        self.globals.pop("lipsum", None)  # texts of any length
        with _counting():
            return super().compile(source, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run an operator, unless its result would be too large."""
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and left.bit_length() * max(right, 0) > _NUMBER_BITS:
                raise TemplateError(f"it computes a number of more than {_NUMBER_BITS:,} bits")
        elif operator == "*" and isinstance(left, int):
            _check_product(right, [left])
        elif operator in "*%" and not isinstance(left, int | float):
            _check_product(left, [right], operator)
        return _new(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:  # pyright: ignore
        """Call a function, a macro or a method, unless it is a method of a text whose result would be too large."""
        method = getattr(function, "__wrapped__", function)  # `str.format` is wrapped by the sandbox
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _spend(_length(owner))
            _check_product(owner, [*args, *options.values()], method.__name__)
        return _new(super().call(context, function, *args, **options))


def bound_templates() -> None:
    """Make transformers render chat templates in a `BoundedEnvironment`, in this process, from now on.

    transformers has no argument for the environment, which its module of templates looks up by name.
    """
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    if module.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        module.ImmutableSandboxedEnvironment = BoundedEnvironment
        module._compile_jinja_template.cache_clear()
