"""The sandbox of chat templates. Jinja's own sandbox bounds a template's access; this one also bounds its computation.

Each rendering has a budget (speculant.text.costs) of characters and elements, which grows with the input, of steps and
of processor time. Iterations, calls, filters, operators, literals and outputs are charged to it.

Not bounded: a single operation without a result, such as a comparison of two large lists or a search in a large text;
and compiling, whose time and memory are proportional to the size of the template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.filters import do_join, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

from speculant.text.costs import Budget, filter_cost, method_cost, operator_cost

_REMOVED_FILTERS = (
    "center",
    "pprint",
    "urlize",
    "wordwrap",
    "xmlattr",
)  # they pad or repeat text; prompts don't need them
_COUNTED, _KEPT = " counted", " kept"  # filters that the compiler inserts
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
        self.filters.update({name: _bounded(name, function) for name, function in self.filters.items()})
        self.filters.update({"join": _join, _COUNTED: _counted, _KEPT: _keep})

    def bound_filter(self, name: str, function: Callable[..., Any], cost: Callable[..., int]) -> None:
        """Add a filter; `cost` takes the budget and then the filter's arguments."""
        self.filters[name] = _charging(function, cost)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Insertions(self).visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may be large."""
        budget = Budget.of(context)
        budget.charge(operator_cost(budget, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's names
        """Make a call of a template."""
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


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return _charging(function, partial(filter_cost, name))


def _charging(function: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
    """Wrap a filter: charge for its cost before it runs, and for its result afterwards."""
    passed = _PASSED[getattr(function, "jinja_pass_arg", None)]

    @pass_context
    def charging(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = Budget.of(context)
        budget.charge(cost(budget, *args, **kwargs))
        return budget.keep(function(*passed(context), *args, **kwargs))

    return charging
