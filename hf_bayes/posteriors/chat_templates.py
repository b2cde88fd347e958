"""A bound on the work of a chat template: it may grow with the conversation, not with numbers in the template.

A chat template is a jinja2 program. transformers runs it in a sandbox without files and imports, but the sandbox does
not stop a program that runs for ever or fills memory. ``check_chat_template`` parses the program without running it. It
refuses

1. more than ``MAX_TEXT`` characters, and programs that jinja2 cannot parse;
2. numbers above ``MAX_NUMBER``, also within a format such as ``%99999d``, powers, and products of two unknowns;
3. loops more than ``MAX_NESTED`` deep, and a loop over the template's own list or range within another loop. A call of
   a macro counts with the loops in the macro. A macro may call itself in a loop only on the parts of its argument;
4. variables that contain more than one copy of themselves (``x = x + x``), directly or through other variables, and
   chains of variables that multiply a text by more than ``MAX_COPIES``.

These bounds cover usual programs and prove nothing: an accepted template can still be slow. Do not load a template that
you would not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 100_000
MAX_NUMBER = 10_000
MAX_NESTED = 5
MAX_COPIES = 10_000

_FORMAT = re.compile(r"[%:][^a-zA-Z%]*\d{5}")


class _Generation(Extension):
    """The tag of transformers around the assistant's text. It is parsed as its content."""

    tags = {"generation"}  # noqa: RUF012, typed so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_chat_template(text: str) -> None:
    """Check, without running it, that a chat template cannot run for ever or fill memory.

    Raises:
        ValueError: naming the line and the reason.
    """
    if not isinstance(text, str):
        raise ValueError(f"a chat template is a text, got {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise ValueError(f"a chat template of {len(text):,} characters is refused, expected at most {MAX_TEXT:,}")
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        tree = environment.parse(text)
        _check_numbers(tree)
        _check_loops(tree)
        _check_growth(tree)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not a jinja2 template: line {error.lineno}: {error.message:.200}"
        ) from None
    except RecursionError:
        raise ValueError("the chat template is refused: its expressions are nested too deep to be read") from None


def _refuse(node: nodes.Node, reason: str) -> None:
    raise ValueError(f"the chat template is refused: line {node.lineno}: {reason}")


def _check_numbers(tree: nodes.Template) -> None:
    for power in tree.find_all(nodes.Pow):
        _refuse(power, "a power")
    for product in tree.find_all(nodes.Mul):
        if not _constants(product):
            _refuse(product, "a product of two unknowns")
    for constant in tree.find_all(nodes.Const):
        match constant.value:
            case int() | float() as number if abs(number) > MAX_NUMBER:
                _refuse(constant, f"the number {str(number)[:40]}, expected at most {MAX_NUMBER:,}")
            case str() as text if _FORMAT.search(text):
                _refuse(constant, "a format with a width of 5 digits")


def _check_loops(tree: nodes.Template) -> None:
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    seen: set[tuple[str, int]] = set()

    def walk(node: nodes.Node, depth: int, calling: tuple[str, ...], inside: _Inside | None) -> None:
        if isinstance(node, nodes.For):
            if depth and _is_own(node.iter):
                _refuse(node, "a loop over a list or range of the template's own within another loop")
            depth, inside = depth + 1, None if inside is None else inside.loop(node)
            if depth > MAX_NESTED:
                _refuse(node, f"loops more than {MAX_NESTED} deep")
        called = _called(node)
        if called in calling:
            if called != calling[-1] or inside is None or not inside.descends(node):
                _refuse(node, "a macro that calls itself in a loop, and not on the parts of its argument")
        elif called in macros and (called, depth) not in seen:
            seen.add((called, depth))
            enter(macros[called], depth, (*calling, called))
        for child in node.iter_child_nodes():
            if not isinstance(child, nodes.Macro):
                walk(child, depth, calling, inside)

    def enter(macro: nodes.Macro, depth: int, calling: tuple[str, ...]) -> None:
        arguments = frozenset(argument.name for argument in macro.args)
        for child in macro.iter_child_nodes():
            walk(child, depth, calling, _Inside(arguments, frozenset(), True, False))

    walk(tree, 0, (), None)
    for macro in macros.values():  # includes a macro that only other macros call
        enter(macro, 0, (macro.name,))


class _Inside(NamedTuple):
    """A place in a macro, to decide if the macro calls itself on smaller and smaller parts, as for nested types.

    Attributes:
        arguments: the arguments of the macro.
        parts: variables of the enclosing loops that run over parts of an argument.
        only_parts: True if all enclosing loops run over parts of an argument.
        in_loop: True if there is an enclosing loop.
    """

    arguments: frozenset[str]
    parts: frozenset[str]
    only_parts: bool
    in_loop: bool

    def loop(self, loop: nodes.For) -> _Inside:
        if _root(loop.iter) not in self.arguments | self.parts:
            return self._replace(only_parts=False, in_loop=True)
        return self._replace(parts=self.parts | set(_targets(loop.target)), in_loop=True)

    def descends(self, call: Any) -> bool:
        smaller = any(_root(argument) in self.parts for argument in call.args)
        return not self.in_loop or (self.only_parts and smaller)


def _root(node: Any) -> str | None:
    """Return the variable that an expression takes a part of."""
    match node:
        case nodes.Getattr(node=whole) | nodes.Getitem(node=whole) | nodes.Call(node=whole) | nodes.Filter(node=whole):
            return _root(whole)
    return _name(node)


def _name(node: Any) -> str | None:
    """Return the name of a variable, or None for another expression."""
    match node:
        case nodes.Name(name=name):
            return str(name)
    return None


def _called(node: Any) -> str | None:
    """Return the name of the macro or function that a node calls, or None."""
    match node:
        case nodes.Call(node=nodes.Name(name=name)):
            return str(name)
    return None


def _is_own(node: Any) -> bool:
    """Return whether a loop runs over a list, text or range of the template itself, not over a part of the input."""
    match node:
        case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Const():
            return True
        case nodes.Call(node=nodes.Name(name="range"), args=arguments):
            return not all(map(_counts, arguments))
    return False


def _counts(node: nodes.Node) -> bool:
    """Return whether an expression is a small number, a length, or a position in a loop."""
    match node:
        case nodes.Const(value=int(number)):
            return abs(number) <= 10
        case nodes.Getattr(node=nodes.Name(name="loop")) | nodes.Filter(name="length" | "count"):
            return True
        case nodes.Add() | nodes.Sub() | nodes.Neg():
            return all(map(_counts, node.iter_child_nodes()))
    return False


def _check_growth(tree: nodes.Template) -> None:
    """Refuse variables whose length a chain of assignments multiplies."""
    _rename_loop_variables(tree)
    parts: dict[str, dict[str, int]] = {}  # variable -> the variables in it, each with its number of copies
    where: dict[str, nodes.Node] = {}
    node: Any
    for node in tree.find_all((nodes.Assign, nodes.AssignBlock, nodes.For)):
        copies = _assigned(node)
        for target in _targets(node.target):
            where.setdefault(target, node)
            parts[target] = _most([parts.get(target, {}), copies])

    for target, inside in parts.items():
        if sum(count for name, count in inside.items() if target in _reached(name, parts)) > 1:
            _refuse(where[target], f"{target!r:.80} is built from more than one copy of itself")
    factors: dict[str, int] = {}

    def factor(name: str) -> int:
        if name not in factors:
            factors[name] = 1  # of a variable that holds one copy of itself
            factors[name] = max(1, sum(count * factor(part) for part, count in parts.get(name, {}).items()))
            if factors[name] > MAX_COPIES:
                _refuse(where[name], f"{name!r:.80} is made of more than {MAX_COPIES:,} copies of a text")
        return factors[name]

    for target in parts:
        factor(target)


def _rename_loop_variables(tree: nodes.Template) -> None:
    """Give the variables of each loop unique names, because two loops may use one name."""
    for index, loop in enumerate(reversed(list(tree.find_all(nodes.For)))):  # inner loops before outer ones
        own = set(_targets(loop.target))
        for part in (loop.target, *loop.body):
            name: Any
            for name in [part, *part.find_all(nodes.Name)]:
                if _name(name) in own:
                    name.name += f" of loop {index}"


def _assigned(node: nodes.Node) -> dict[str, int]:
    """Return the variables in what a node assigns to its target, each with its number of copies."""
    match node:
        case nodes.AssignBlock(body=body):
            return _total(body)
        case nodes.For(iter=value) | nodes.Assign(node=value):
            return _copies(value)
    raise AssertionError(f"{type(node).__name__} assigns nothing")


def _reached(start: str, parts: Mapping[str, Mapping[str, int]]) -> set[str]:
    """Return the variable and all variables that it is made of."""
    seen, left = {start}, [start]
    while left:
        new = parts.get(left.pop(), {}).keys() - seen
        seen |= new
        left += new
    return seen


def _targets(node: nodes.Node) -> Iterator[str]:
    for found in [node, *node.find_all((nodes.Name, nodes.NSRef))]:
        match found:
            case nodes.NSRef(name=name, attr=attribute):
                yield f"{name}.{attribute}"
            case nodes.Name(name=name):
                yield name


@singledispatch
def _copies(node: nodes.Node) -> dict[str, int]:
    """Return variable -> the largest number of copies of it in an expression. "" stands for repeated constants."""
    total = _total(node.iter_child_nodes())
    return {name: 100 * count for name, count in total.items()} if _inserts(node) else total


_copies_of_parts = _copies.dispatch(nodes.Node)


@_copies.register
def _of_name(node: nodes.Name) -> dict[str, int]:
    return {node.name: 1}


@_copies.register
def _of_attribute(node: nodes.Getattr) -> dict[str, int]:
    name = _name(node.node)
    return _copies_of_parts(node) if name is None else {f"{name}.{node.attr}": 1, name: 1}


@_copies.register(nodes.Compare)
@_copies.register(nodes.Test)
@_copies.register(nodes.Not)
def _of_condition(node: nodes.Node) -> dict[str, int]:
    return {}


@_copies.register
def _of_filter(node: nodes.Filter) -> dict[str, int]:
    return {} if node.name in ("length", "count") else _copies_of_parts(node)


@_copies.register
def _of_item(node: nodes.Getitem) -> dict[str, int]:
    return _copies(node.node)


@_copies.register
def _of_branches(node: nodes.CondExpr) -> dict[str, int]:
    return _most([_copies(branch) for branch in (node.expr1, node.expr2) if branch is not None])


@_copies.register(nodes.And)
@_copies.register(nodes.Or)
def _of_choice(node: nodes.BinExpr) -> dict[str, int]:
    return _most([_copies(node.left), _copies(node.right)])


@_copies.register
def _of_product(node: nodes.Mul) -> dict[str, int]:
    size = max((abs(int(c)) if isinstance(c, int | float) else len(c) for c in _constants(node)), default=1)
    total = _total(node.iter_child_nodes())
    return {name: count * max(1, size) for name, count in (total or {"": 1}).items()}


def _constants(product: nodes.Mul) -> list[Any]:
    """Return the values of the constants among the two factors of a product."""
    return [side.value for side in (product.left, product.right) if isinstance(side, nodes.Const)]


def _inserts(node: nodes.Node) -> bool:
    """Return whether an expression puts an unknown text between all parts of another text."""
    match node:
        case nodes.Filter(name="replace", args=given) | nodes.Call(node=nodes.Getattr(attr="replace"), args=given):
            texts = given[1:2]
        case nodes.Filter(name="join", args=given) | nodes.Call(node=nodes.Getattr(attr="join"), args=given):
            texts = given[:1]
        case _:
            texts = []
    return any(not isinstance(text, nodes.Const) for text in texts)


def _total(found: Iterable[nodes.Node]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for node in found:
        total.update(_copies(node))
    return dict(total)


def _most(found: Iterable[Mapping[str, int]]) -> dict[str, int]:
    most: dict[str, int] = {}
    for copies in found:
        for name, count in copies.items():
            most[name] = max(most.get(name, 0), count)
    return most
