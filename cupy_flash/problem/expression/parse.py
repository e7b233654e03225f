"""From a text to a tree. Python's parser reads it and nothing runs it."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from .operations import DEEPEST, FUNCTIONS, MOST_NODES, Mistake, apply, literal
from .source import Source
from .tree import Literal, Node
from .vocabulary import Declaration, Vocabulary, bare, read, unknown_function

LONGEST = 10_000
QUIET = threading.Lock()  # filters of warnings are those of all threads: two that put them back would mix them up

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.USub: "neg",
    ast.UAdd: "pos",
    ast.Not: "not",
    ast.Invert: "~",
    ast.And: "and",
    ast.Or: "or",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
REFUSED: dict[type[ast.AST], str] = {
    ast.Attribute: "an attribute",
    ast.Lambda: "a lambda",
    ast.NamedExpr: "an assignment",
    ast.Starred: "a starred expression",
    ast.JoinedStr: "a string",
    ast.Tuple: "a tuple",
    ast.List: "a list",
    ast.Dict: "a dict",
    ast.Set: "a set",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Slice: "a slice",
    ast.MatMult: "'@'",
    ast.Is: "'is'",
    ast.IsNot: "'is not'",
    ast.In: "'in'",
    ast.NotIn: "'not in'",
}
FOREIGN = {"&&": "and", "||": "or"}  # operators of other languages


def parse(text: str, declarations: Iterable[Declaration], option: str) -> Node:
    """The tree of a text.

    Parameters
    ----------
    text : str
        An expression in Python's syntax.
    declarations : iterable of Declaration
        The arrays that it may read.
    option : str
        'score', whose tree is a float, or 'mask', whose tree is a bool and has no name 'score'.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{option}: expected at most {LONGEST} characters, got {len(text)}")
    source = Source(option, text)
    root = _syntax(source)
    reader = _Reader(source, Vocabulary.of(option, declarations))
    tree = reader.node(root, 1)
    try:
        return reader.vocabulary.finish(tree)
    except Mistake as mistake:
        raise source.refusal(mistake, source.place_of(root)) from None


def _syntax(source: Source) -> ast.expr:
    """The tree that Python makes of a text."""
    expected = "an expression in Python's syntax"
    for place, character in enumerate(source.text):
        if character == "\0" or "\ud800" <= character <= "\udfff":  # of which Python says no place
            raise source.refusal(Mistake(expected, f"the character {character!r}"), place)
    try:
        with QUIET, warnings.catch_warnings():  # as of 1if x else 2, which Python accepts, but not for ever
            warnings.simplefilter("ignore")
            return ast.parse(source.text[source.blanks :] + "\n", mode="eval").body  # without it an error at the end has no column
    except SyntaxError as error:
        found = {foreign: source.text.find(foreign) for foreign in FOREIGN if foreign in source.text}
        if found:
            foreign = min(found, key=found.get)
            mistake = Mistake(f"'{FOREIGN[foreign]}'", f"'{foreign}'", f"write '{FOREIGN[foreign]}' for '{foreign}'")
            raise source.refusal(mistake, found[foreign]) from None
        raise source.refusal(Mistake(expected, "an error", error.msg), source.place_of_error(error)) from None
    except (RecursionError, MemoryError):  # Python's ways to say that a text is too deep for its parser
        raise source.refusal(Mistake(f"nesting of at most {DEEPEST}", "more"), source.blanks) from None


@dataclass(slots=True)
class _Reader:
    source: Source
    vocabulary: Vocabulary
    nodes: int = 0

    def node(self, node: ast.expr, depth: int) -> Node:
        """The tree of a node of Python's."""
        # Bounds of the work: the tree is measured in the end, and its text may have one more level and two nodes for each, as -inf.
        self.nodes += 1
        if self.nodes > 2 * MOST_NODES:
            raise self._refusal(Mistake(f"at most {MOST_NODES} nodes", "more"), node)
        if depth > DEEPEST + 1:
            raise self._refusal(Mistake(f"nesting of at most {DEEPEST}", "more"), node)
        match node:
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                indices = index.elts if isinstance(index, ast.Tuple) and index.elts else [index]
                return self._read(node, name, indices, depth)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
                return self._constant(node, -value)  # one node, so that the smallest int can be written
            case ast.UnaryOp(op=op, operand=operand):
                return self._apply(node, op, [operand], depth)
            case ast.BinOp(left=left, op=op, right=right):
                return self._apply(node, op, [left, right], depth)
            case ast.BoolOp(op=op, values=[first, *others]):
                return self._chain(node, op, first, others, depth)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                # What stands between two comparisons is read twice, and counts twice.
                lefts = [left, *rights[:-1]]
                return reduce(
                    lambda so_far, pair: apply("and", so_far, pair),
                    [self._apply(node, op, pair, depth + (len(ops) > 1)) for op, *pair in zip(ops, lefts, rights)],
                )
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._apply(node, "where", [test, body, orelse], depth)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                if name not in FUNCTIONS:
                    raise self._refusal(unknown_function(name), node)
                if keywords:
                    raise self._refusal(Mistake(f"arguments of '{name}' without keywords", "a keyword"), keywords[0])
                return self._apply(node, name, args, depth)
            case ast.Call(func=func):
                known = isinstance(func, ast.Attribute) and func.attr in FUNCTIONS
                hint = f"write '{func.attr}' alone" if known else ""
                raise self._refusal(Mistake("the name of a function", self._what(func), hint), node)
            case ast.Subscript():
                raise self._refusal(Mistake("the name of an array before '['", self._what(node.value)), node)
        raise self._refusal(Mistake("names, numbers, operators and functions", self._what(node)), node)

    def _apply(self, node: ast.expr, op: ast.AST | str, operands: Sequence[ast.expr], depth: int) -> Node:
        if isinstance(op, ast.AST):
            if type(op) not in OPERATORS:
                raise self._refusal(Mistake("an operator of numbers", REFUSED[type(op)]), node)
            op = OPERATORS[type(op)]
        args = [self.node(operand, depth + 1) for operand in operands]
        try:
            return apply(op, *args)
        except Mistake as mistake:
            raise self._refusal(mistake, node if mistake.arg is None else operands[mistake.arg]) from None

    def _chain(self, node: ast.expr, op: ast.boolop, first: ast.expr, others: list[ast.expr], depth: int) -> Node:
        tree = self.node(first, depth + 1)
        for place, other in enumerate(others):
            right = self.node(other, depth + 1)
            try:
                tree = apply(OPERATORS[type(op)], tree, right)
            except Mistake as mistake:
                raise self._refusal(mistake, other if mistake.arg else [first, *others][place]) from None
        return tree

    def _constant(self, node: ast.expr, value: object) -> Literal:
        if not isinstance(value, (bool, int, float)):
            names = {str: "a string", bytes: "bytes", complex: "a complex number", type(...): "an ellipsis", type(None): "None"}
            raise self._refusal(Mistake("a number", names[type(value)]), node)
        try:
            if value in (float("inf"), float("-inf")):
                raise Mistake("a number that a float holds", "a larger one", "inf is a constant")
            return literal(value)
        except Mistake as mistake:
            raise self._refusal(mistake, node) from None

    def _name(self, node: ast.Name, name: str) -> Node:
        try:
            meaning = self.vocabulary.meaning(name)
            if isinstance(meaning, Declaration):
                raise bare(meaning)
            return meaning
        except Mistake as mistake:
            raise self._refusal(mistake, node) from None

    def _read(self, node: ast.expr, name: str, indices: Sequence[ast.expr], depth: int) -> Node:
        try:
            meaning = self.vocabulary.meaning(name, is_indexed=True)
            if not isinstance(meaning, Declaration):
                is_number = name in self.vocabulary.declared
                hint = f"it is a number: write '{name}'" if is_number else ""
                raise Mistake("the name of an array before '['", f"'{name}'", hint)
        except Mistake as mistake:
            raise self._refusal(mistake, node) from None
        args = [self.node(index, depth + 1) for index in indices]
        try:
            return read(meaning, args)
        except Mistake as mistake:
            raise self._refusal(mistake, node if mistake.arg is None else indices[mistake.arg]) from None

    def _refusal(self, mistake: Mistake, node: ast.expr | ast.keyword) -> ValueError:
        return self.source.refusal(mistake, self.source.place_of(node))

    @staticmethod
    def _what(node: ast.expr) -> str:
        return REFUSED.get(type(node), "another expression")
