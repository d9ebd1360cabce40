"""The sandbox of chat templates. Jinja's own sandbox bounds a template's access; this one also bounds its computation.

Each rendering has a budget of characters and elements, which grows with the input, of steps and of processor time.
Iterations, calls, filters, operators, literals and outputs are charged to it. A step makes characters of text, elements
of lists at every level, or bits of integers. Costs that could be large are computed before the step runs.

Not bounded: a single operation without a result, such as a comparison of two large lists or a search in a large text;
and compiling, whose time and memory are proportional to the size of the template.
"""

from __future__ import annotations

import re
import time
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Sized,
    ValuesView,
)
from functools import partial
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import do_join, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer
from typing_extensions import override

LEAST_BUDGET, BUDGET_PER_INPUT = 2**24, 64  # characters, and characters per character of the input
MOST_ELEMENTS = 2**20  # of one value, over all levels; the input may contain itself
_MOST_INPUT = 2**24  # characters of the input that count
MOST_STEPS, MOST_SECONDS = 10**7, 5.0  # of processor time
_STEPS_PER_LOOK = 64  # steps between readings of the clock
_BIT = 64  # the cost of a bit of an integer: multiplying takes longer than copying
_BUDGET = " budget"  # the variable that holds it; no template can write this name
_END = object()
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_ATTRIBUTES = "_Namespace__attrs"
_WIDE = re.compile(r"[0-9]{5}|[{*]")  # a width of 10,000 or more, or a computed one
# A conversion of the operator %: its width and precision
_CONVERSION = re.compile(r"%(?:\([^()]*\))?([^A-Za-z%(]*)[A-Za-z%]")
_NESTED_KEY = re.compile(r"%\([^()]*\(")
_KEEPING_FILTERS = frozenset(  # filters that return parts of their input, not its text
    [
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round"),
        *("select", "selectattr", "slice", "sort", "sum", "unique"),
    ]
)

# They pad or repeat text; prompts don't need them.
_REMOVED_FILTERS = ("center", "pprint", "urlize", "wordwrap", "xmlattr")
_COUNTED, _KEPT = " counted", " kept"  # filters that the compiler inserts


class Budget:
    """The output that a rendering may still make, and the steps that it may still take."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        size, _ = _measure(variables, True, _MOST_INPUT)
        self._left = self._most = LEAST_BUDGET + BUDGET_PER_INPUT * size
        self._steps = self._next_look = MOST_STEPS
        self._deadline = time.thread_time() + MOST_SECONDS

    @staticmethod
    def of(context: Context) -> Budget:
        """Return the budget of the rendering."""
        budget: Budget = context.parent[_BUDGET]
        return budget

    def variables(self) -> dict[str, Any]:
        """Return the variable that a template's context needs."""
        return {_BUDGET: self}

    def charge(self, cost: int) -> None:
        """Charge for a step that makes `cost` characters or elements. Raises SecurityError beyond the budget."""
        self._left -= cost
        self._steps -= 1
        if self._left < 0:
            raise SecurityError(f"it made more than {self._most} characters or elements")
        if self._steps < 0:
            raise SecurityError(f"it took more than {MOST_STEPS} steps")
        if self._steps <= self._next_look:
            self._next_look = self._steps - _STEPS_PER_LOOK
            if time.thread_time() > self._deadline:
                raise SecurityError(f"it ran for more than {MOST_SECONDS:g} seconds")

    def text(self, value: Any, indent: int = 0) -> int:
        """Return the characters of a value's text, with elements indented by level. Takes a step per element."""
        return self._measure(value, True, indent)

    def keep(self, value: Any) -> Any:
        """Charge for the characters of a text or the elements of a container, and return the value."""
        self.charge(len(value) if isinstance(value, str | bytes) else self._measure(value, False))
        return value

    def _measure(self, value: Any, texts: bool, indent: int = 0) -> int:
        size, elements = _measure(value, texts, self._left, indent)
        if elements > MOST_ELEMENTS:
            raise SecurityError(f"it used a list of more than {MOST_ELEMENTS} elements")
        self._steps -= elements
        return size


def _measure(value: Any, texts: bool, most: int, indent: int = 0) -> tuple[int, int]:
    """Return the size of a value, and its number of elements over all levels. Stops above `most` or MOST_ELEMENTS.

    The size is the number of elements, plus their characters if `texts` is set. A list that occurs twice in another one
    counts twice, as it does when it is printed.
    """
    size, elements, levels = 0, 0, [iter((value,))]
    while levels and size <= most and elements <= MOST_ELEMENTS:
        value = next(levels[-1], _END)
        if value is _END:
            levels.pop()
            continue
        elements += 1
        size += 1 + (len(levels) - 1) * indent + (_characters(value) if texts else 0)
        inner = _inner(value)
        if inner:
            levels.append(iter(inner))
    return size, elements


def _inner(value: Any) -> Collection[Any]:
    if isinstance(value, Namespace):
        value = getattr(value, _ATTRIBUTES)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, _CONTAINERS) else ()


def _characters(value: Any) -> int:
    """Return roughly the characters of a value's text, without those of its elements."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    plain = isinstance(value, (*_CONTAINERS, dict, Namespace, float)) or value is None
    return 0 if plain else len(repr(value))


def filter_cost(name: str, budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """Return the cost of a filter that its result does not show, or that must be known before it runs."""
    given = [*args, *kwargs.values()]
    if name == "sum" and not all(isinstance(each, int | float) for each in (kwargs.get("start", 0), *args[1:])):
        raise SecurityError("it calls sum on values that are not numbers")
    if name == "replace":
        old, new = (args[i] if len(args) > i else kwargs.get(key, "") for i, key in enumerate(("old", "new")))
        return _replaced(budget, value, old, new)
    if name == "format":
        return _formatted(budget, value, given, percent=True)
    if name == "indent":
        lines = len(value.splitlines()) if isinstance(value, str) else budget.text(value)
        return budget.text(value) + lines * max([4, *map(_width, given)])
    if name in ("batch", "slice", "round"):
        return _BIT * sum(map(_width, given))
    return 0 if name in _KEEPING_FILTERS or isinstance(value, str) else budget.text(value)


def method_cost(budget: Budget, receiver: Any, name: str, args: tuple[Any, ...]) -> int:
    """Return the cost of a method of a text, of bytes or of an integer."""
    if name == "translate":
        raise SecurityError("it called str.translate")
    if name == "replace":
        return _replaced(budget, receiver, *args[:2]) if len(args) > 1 else 0
    if name == "join":
        return budget.text(args) + budget.text(receiver) * (len(args[0]) if args else 0)
    if name in ("format", "format_map"):
        return _formatted(budget, receiver, args)
    if name == "expandtabs":
        return len(receiver) * max([8, *map(_width, args)])
    return sum(map(_width, args)) if name in ("center", "ljust", "rjust", "zfill", "to_bytes") else 0


def operator_cost(budget: Budget, operator: str, left: Any, right: Any) -> int:
    """Return the cost of an operator on texts, lists or integers."""
    if operator == "%":
        return _formatted(budget, left, (right,), percent=True) if isinstance(left, str | bytes) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return _BIT * (bits * max(right, 0) if operator == "**" else bits + right.bit_length())
    if operator == "+":
        return sum(len(each) for each in (left, right) if isinstance(each, Sized))
    pair = (left, right) if isinstance(right, int) else (right, left)
    return len(pair[0]) * max(pair[1], 0) if isinstance(pair[0], Sized) and isinstance(pair[1], int) else 0


def _width(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _replaced(budget: Budget, text: Any, old: Any, new: Any) -> int:
    """Return the size of a text after replacing each `old` by `new`."""
    exact = isinstance(text, str | bytes) and isinstance(old, type(text) | str)
    times = text.count(old) if exact else budget.text(text)
    return budget.text(text) + times * budget.text(new)


def _formatted(budget: Budget, template: Any, values: Sequence[Any], percent: bool = False) -> int:
    """Return the most characters that formatting makes. Raises SecurityError for computed or large widths."""
    if percent:
        template = template.decode("latin-1") if isinstance(template, bytes) else str(template)
        widths = _CONVERSION.findall(template)
    else:
        widths = [spec or "" for _, field, spec, _ in Formatter().parse(template) if field is not None]
    if any(map(_WIDE.search, widths)) or (percent and _NESTED_KEY.search(template)):
        raise SecurityError("it uses a format with a width that is computed or above 9999")
    padding = sum(int(digits) for width in widths for digits in re.findall(r"[0-9]+", width))
    return len(template) + padding + len(widths) * budget.text(list(values))


_PASSED: dict[Any, Callable[[Context], tuple[Any, ...]]] = {
    None: lambda context: (),
    _PassArg.context: lambda context: (context,),
    _PassArg.eval_context: lambda context: (context.eval_ctx,),
    _PassArg.environment: lambda context: (context.environment,),
}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates need `Budget.variables` in their context. Over budget it raises SecurityError."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_output)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, function in self.filters.items():
            self.filters[name] = _charging(function, partial(filter_cost, name))
        self.filters.update({"join": _join, _COUNTED: _counted, _KEPT: _keep})

    def bound_filter(self, name: str, function: Callable[..., Any], cost: Callable[..., int]) -> None:
        """Add a filter; `cost` takes the budget and then the filter's arguments."""
        self.filters[name] = _charging(function, cost)

    @override
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Insertions(self).visit(super()._parse(source, name, filename))
        return template

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = Budget.of(context)
        budget.charge(operator_cost(budget, operator, left, right))
        return super().call_binop(context, operator, left, right)

    @override
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's names
        budget = Budget.of(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(getattr(method, "__self__", None), str | bytes | int):
            if method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])  # an iterator must be a list to be measured
            budget.charge(method_cost(budget, method.__self__, method.__name__, (*args, *kwargs.values())))
        return budget.keep(super().call(__context, __obj, *args, **kwargs))


class _Insertions(NodeTransformer):
    """Inserts filters that charge for loops, literals and `~`."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    @override
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Return the node with its parts visited, or its replacement."""
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.iter = self._filter(node.iter, _COUNTED, nodes.Const(text))
        if isinstance(node, nodes.Concat):
            items = nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
            return self._filter(items, "join")
        if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            parts = node.find_all(nodes.Expr)
            return node if all(isinstance(part, nodes.Const) for part in parts) else self._filter(node, _KEPT)
        return node

    def _filter(self, node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
        place = {"lineno": node.lineno, "environment": self._environment}
        return nodes.Filter(node, name, list(args), [], None, None, **place)


@pass_context
def _output(context: Context, value: Any) -> Any:
    """Charge for a value that is printed, wherever its text is used."""
    budget = Budget.of(context)
    budget.charge(budget.text(value))
    return value


@pass_context
def _counted(context: Context, items: Iterable[Any], text: int) -> Iterator[Any]:
    """Charge for each iteration of a loop the characters of plain text in its body."""
    budget = Budget.of(context)
    for item in items:
        budget.charge(text)
        yield item


@pass_context
def _keep(context: Context, value: Any) -> Any:
    return Budget.of(context).keep(value)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    """Jinja's `join`, which reads all items into a list first."""
    items = list(value)
    if attribute is not None:
        items = [*map(make_attrgetter(context.environment, attribute), items)]
    budget = Budget.of(context)
    budget.charge(budget.text(items) + len(items) * budget.text(d))
    return do_join(context.eval_ctx, items, d)


def _charging(function: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
    """Wrap a filter: charge for its cost before it runs, and for its result afterwards."""
    passed = _PASSED[getattr(function, "jinja_pass_arg", None)]

    @pass_context
    def charging(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = Budget.of(context)
        budget.charge(cost(budget, *args, **kwargs))
        return budget.keep(function(*passed(context), *args, **kwargs))

    return charging
