"""A chat template's syntax tree: calls of the meter in it, and how much source it may have.

The functions that are called are the environment's, in `llmcli.text.sandbox`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

_MAX_TOKENS = 1 << 15  # of the source; 30,000 characters have some 8,000


def _call(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Call:
    target = nodes.EnvironmentAttribute(name)
    made = nodes.Call(target, list(args), [], None, None)
    return made.set_environment(node.environment).set_lineno(node.lineno)  # type: ignore


class Metered(NodeTransformer):
    """Puts calls of the meter into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Time at every turn, also of those that the loop's condition leaves out."""
        self.generic_visit(node)
        turn = nodes.ExprStmt(_call("tick", node), lineno=node.lineno)
        node.body.insert(0, turn)
        if node.test is not None:
            node.test = nodes.And(_call("tick", node), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        """`a ~ b` writes both as text."""
        self.generic_visit(node)
        node.nodes = [_call("written", part, part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """A slice is a copy."""
        self.generic_visit(node)
        return _call("made", node, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Both sides, with all that they hold."""
        self.generic_visit(node)
        holders: list[Any] = [node, *node.ops]
        for part in holders:
            if not isinstance(part.expr, nodes.Const):
                part.expr = _call("compared", part.expr, part.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """One that is made may be a key of a dict, which is hashed with all that it holds."""
        self.generic_visit(node)
        if node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return _call("compared", node, node)


class Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the two words, as if they were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Short(Extension):
    """Ends the parsing of what would take minutes and gigabytes to compile."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """The same tokens; OverflowError where there are too many."""
        for count, token in enumerate(stream):
            if count > _MAX_TOKENS:
                raise OverflowError(f"it has more than {_MAX_TOKENS} words and signs")
            yield token
