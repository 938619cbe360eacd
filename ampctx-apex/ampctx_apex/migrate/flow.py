"""What statements read, assign and call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.migrate.analysis import Parsed, dotted
from ampctx_apex.migrate.imports import indent_of
from ampctx_apex.migrate.report import Edit


class NotUnderstood(Exception):
    """Why a loop is not rewritten. ``topic``: the section of docs/to_torch_amp.md."""

    topic = ""


@contextlib.contextmanager
def about(topic: str) -> Iterator[None]:
    """Gives refusals within it a topic, unless they have one."""
    try:
        yield
    except NotUnderstood as error:
        error.topic = error.topic or topic
        raise


def refuse(parsed: Parsed, node: cst.CSTNode, reason: str) -> NotUnderstood:
    return NotUnderstood(f"line {parsed.line(node)}: {reason}")


def below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all its descendants."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children)


def contains(parsed: Parsed, statement: cst.CSTNode, node: cst.CSTNode) -> bool:
    return node is statement or any(a is statement for a in parsed.ancestors(node))


def names(parsed: Parsed, node: cst.CSTNode) -> Iterator[cst.Name]:
    """The variables in a node, without attributes and keywords."""
    return (n for n in below(node) if isinstance(n, cst.Name) and parsed.scopes.get(n) is not None)


def loads(parsed: Parsed, node: cst.CSTNode) -> set[str]:
    """The variables that a node reads, and the attributes of ``self``."""
    return _used(parsed, node, meta.ExpressionContext.LOAD)


def stores(parsed: Parsed, node: cst.CSTNode) -> set[str]:
    """The variables that a node assigns, and the attributes of ``self``."""
    return _used(parsed, node, meta.ExpressionContext.STORE)


def _used(parsed: Parsed, node: cst.CSTNode, context: meta.ExpressionContext) -> set[str]:
    attributes = (n for n in below(node) if isinstance(n, cst.Attribute) and dotted(n).startswith("self."))
    return {dotted(n) for n in [*names(parsed, node), *attributes] if parsed.contexts.get(n) is context}


def calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    return (n for n in below(node) if isinstance(n, cst.Call))


def simple_statement(parsed: Parsed, small: cst.CSTNode, what: str) -> cst.SimpleStatementLine:
    """The line of a statement. Refuses if it holds other statements."""
    line = parsed.parents[small]
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        raise refuse(parsed, small, f"{what} is not a statement on its own line")
    return line


def is_plain(node: cst.CSTNode, logic: bool = False) -> bool:
    """Only variables, attributes, numbers and arithmetic; with ``logic`` also comparisons and ``len``."""
    if isinstance(node, cst.Name | cst.Integer | cst.Float):
        return True
    if isinstance(node, cst.Attribute):
        return is_plain(node.value)
    if isinstance(node, cst.BinaryOperation):
        parts = [node.left, node.right]
        return not isinstance(node.operator, cst.MatrixMultiply) and all(is_plain(p, logic) for p in parts)
    if not logic:
        return False
    if isinstance(node, cst.Comparison):
        return all(is_plain(p, logic) for p in [node.left, *(c.comparator for c in node.comparisons)])
    if isinstance(node, cst.BooleanOperation):
        return is_plain(node.left, logic) and is_plain(node.right, logic)
    if isinstance(node, cst.UnaryOperation):
        return is_plain(node.expression, logic)
    return isinstance(node, cst.Call) and dotted(node.func) == "len" and all(is_plain(a.value) for a in node.args)


# --- edits ------------------------------------------------------------------------------------------------------------


def wrapped(parsed: Parsed, first: cst.CSTNode, last: cst.CSTNode, header: str) -> list[Edit]:
    """Edits that indent the lines from ``first`` to ``last`` below ``header``. Lines inside strings stay."""
    start, end = parsed.line_start(parsed.span(first)[0]), parsed.span(last)[1]
    indent, newline = indent_of(parsed, first), parsed.tree.default_newline
    unit = "\t" if "\t" in indent else parsed.tree.default_indent
    strings = [parsed.span(n) for n in parsed.nodes if isinstance(n, cst.SimpleString | cst.FormattedString)]
    edits = [Edit(start, start, f"{indent}{header}{newline}{unit}")]
    for line in parsed.starts:
        is_blank = not parsed.text[line : parsed.line_end(line)].strip()
        if start < line < end and not is_blank and not any(a < line < b for a, b in strings):
            edits.append(Edit(line, line, unit))
    return edits
