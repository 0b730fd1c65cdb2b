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
import threading
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence, Sized
from string import Formatter
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
    *("startswith", "endswith", "find", "index", "count", "split", "partition", "removeprefix"),
    *("removesuffix", "default", "d", "truncate", "map", "select", "reject", "selectattr", "rejectattr"),
    *("sort", "unique", "groupby", "dictsort"),
)
"""Methods and filters whose time and result are at most the sum of their operands."""
_PER_CHARACTER = (
    *("title", "wordcount", "urlencode", "join", "list", "map", "reject", "select", "sort", "unique"),
)
"""Filters that run Python code for every character or word of a string."""
_SEARCHES = ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim")
"""Methods and filters whose time is at most the product of their operands, in comparisons of two characters."""
_QUADRATIC = ("sum", "striptags", "urlize", "wordwrap", "xmlattr", "pprint")
"""Filters whose time or result may grow with the square of the input."""
_REFUSED = ("generate_lorem_ipsum", "encode", "decode")
"""Functions whose time is not bounded by their arguments: `lipsum`, and codecs such as punycode."""
_CONVERSION = re.compile(r"%(?:\([^()]*\))?([-+ #0]*[\d*.]*[hlL]?.?)", re.DOTALL)
"""A conversion of the operator %, without its key. One that begins with "(" has a key with parentheses."""

_replacing = threading.RLock()
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
        item = pending.pop()
        size += _ITEM
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple | MappingView):
            pending.extend(item)  # type: ignore[arg-type]
        elif isinstance(item, Namespace):
            pending.append(item._Namespace__attrs)  # type: ignore[attr-defined]
        elif isinstance(item, Sequence):  # a range
            size += _ITEM * len(item)
        elif isinstance(item, int):
            size += item.bit_length()
            if item.bit_length() > _NUMBER_BITS:
                raise TemplateError(f"it computes a number of more than {_NUMBER_BITS:,} bits")
        _check(size)
    return size


def _length(value: Any) -> int:
    """Return the work of a value, without the contents of its items."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, Sized) else 0


def _charge(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Count the time of an operation, and raise TemplateError if less work is left than its result may take.

    Arguments multiply a value as counts (`*`), widths (`center`) or as replacement strings (`replace`).
    """
    _spend(_length(value) * (6 if name in _PER_CHARACTER else 1))
    strings: list[Any] = [argument for argument in arguments if isinstance(argument, str | bytes)]
    characters = sum(map(len, strings))
    if name in _LINEAR:
        return
    if name in _SEARCHES:
        # A step takes the time of 16 comparisons.
        _spend(_length(value) * characters // 16)
    elif name in ("%", "format", "format_map"):
        fields = (
            _CONVERSION.findall(str(value))
            if name == "%"
            else [item[2] for item in Formatter().parse(str(value))]
        )
        if any(
            character in spec for spec in filter(None, fields) for character in ("*(" if name == "%" else "{")
        ):
            raise TemplateError("a width that is an argument is not supported")
        # A width such as that of "%1000000d" is in the format string.
        widths = sum(int(digits[:20]) for spec in fields for digits in re.findall(r"\d+", spec or ""))
        _check(widths + len(fields) * sum(map(_size, arguments)))
    elif name == "join":
        _check(_size(value) + (len(value) if isinstance(value, Sized) else 1) * characters)
    elif name == "replace" and isinstance(value, str) and len(strings) == 2:
        _check(max(map(value.count, strings)) * characters)
    else:
        factors = [abs(item) if isinstance(item, int) else _size(item) - _ITEM + 1 for item in arguments]
        factors += [_size(value)] if name in _QUADRATIC else []
        _check((_size(value) - _ITEM + 1) * sum(factors) if factors else 0)


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a filter, or a test by the name "test", so that it counts its work in all compiled templates."""
    first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        value, *arguments = args[first:]
        # A list has a known size.
        if isinstance(value, Iterator) and arguments:
            value = list(value)
        operands = [*arguments, *options.values()]
        if name == "test":
            _spend(sum(map(_size, [value, *operands])) if operands else 0)
        elif name not in ("length", "count"):
            _charge("%" if name == "format" else name, value, operands)
        return _new(function(*args[:first], value, *arguments, **options))

    return counted


def _new(value: Any) -> Any:
    """Count a new value, and return it."""
    _spend(_STEP + (0 if _left.get() is None else _size(value)))
    return value


# With the context as an argument, Jinja does not compute them when it compiles.
@pass_context
def _value(context: Any, value: Any) -> Any:
    return _new(value)


@pass_context
def _step(context: Any, value: Any, work: int) -> Any:
    _spend(_STEP + work)
    return value


@pass_context
def _joined(context: Any, values: list[Any]) -> str:
    """Return `a ~ b ~ c`, counted before the parts are put together."""
    texts = [str(_new(value)) for value in values]
    _spend(sum(map(len, texts)))
    return "".join(texts)


def _filtered(node: Any, name: str, *arguments: int) -> Any:
    constants: list[nodes.Expr] = [nodes.Const(argument) for argument in arguments]
    return nodes.Filter(node, name, constants, [], None, None).set_lineno(node.lineno)


class _Counting(NodeTransformer):
    """Adds filters that count to the syntax tree: where it makes or compares values, repeats a body, or prints."""

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, " value")

    visit_Dict = visit_Tuple = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> Any:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, " value")
        # The time of a hash grows with the key.
        node.arg = node.arg if isinstance(node.arg, nodes.Const) else _filtered(node.arg, " value")
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), " joined")

    def visit_Compare(self, node: nodes.Compare) -> Any:
        self.generic_visit(node)
        for operand in (node, *node.ops):
            operand.expr = _filtered(operand.expr, " value")
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        node.nodes = [_filtered(nodes.List([item], lineno=node.lineno), " joined") for item in node.nodes]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> Any:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: Any) -> Any:
        work = _NODE * sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        start = _filtered(nodes.Const("", lineno=node.lineno), " step", work)
        node.body.insert(0, nodes.Output([start], lineno=node.lineno))
        # The condition also runs for items that it excludes.
        if getattr(node, "test", None) is not None:
            node.test = _filtered(node.test, " step", work)
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
        # An environment compiles one template, after its filters are registered.
        self.filters = {name: _counted(function, name) for name, function in self.filters.items()}
        self.filters |= {" value": _value, " step": _step, " joined": _joined}
        self.tests = {name: _counted(function, "test") for name, function in self.tests.items()}
        with _counting():
            return super().compile(source, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run an operator, unless its result would be too large."""
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and left.bit_length() * max(right, 0) > _NUMBER_BITS:
                raise TemplateError(f"it computes a number of more than {_NUMBER_BITS:,} bits")
        elif operator == "*" and isinstance(left, int):
            _charge(operator, right, [left])
        elif operator in "*%" and not isinstance(left, int | float):
            _charge(operator, left, [right])
        return _new(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:  # pyright: ignore
        """Call a function, a macro or a method, unless it is a method of a string whose result would be too large."""
        method = getattr(function, "__wrapped__", function)  # `str.format` is wrapped by the sandbox
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name in _REFUSED:
            raise TemplateError(f"the function {name} is not supported")
        if isinstance(owner, str | bytes | int):
            # A list has a known size.
            args = tuple(list(item) if isinstance(item, Iterator) else item for item in args)
            items, *others = (args[0], owner) if name == "join" and args else (owner, *args)
            _charge(name, items, [*others, *options.values()])
        elif owner is not None:
            operands = [*args, *options.values(), *([owner] if isinstance(owner, Sequence) else [])]
            _spend(sum(map(_size, operands)))
        return _new(super().call(context, function, *args, **options))


@functools.lru_cache(maxsize=16)
def _compiled(compile_template: Callable[[str], Template], source: str) -> Template:
    """Compile a template in the environment that transformers gives one, with its filters, extensions and globals."""
    environment = compile_template("").environment.overlay()
    environment.__class__ = BoundedEnvironment
    return environment.from_string(source)


@contextlib.contextmanager
def bounded_templates() -> Iterator[None]:
    """Make transformers render chat templates in a `BoundedEnvironment`, for one thread at a time, and then as before.

    transformers has no argument for the environment.
    """
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    with _replacing:
        compile_template = module._compile_jinja_template
        module._compile_jinja_template = functools.partial(_compiled, compile_template)
        try:
            yield
        finally:
            module._compile_jinja_template = compile_template
