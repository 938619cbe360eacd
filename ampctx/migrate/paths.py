"""Control flow in a training loop: a scaler must see ``unscale_``, ``step`` and ``update`` together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import libcst as cst

from ampctx.migrate import flow
from ampctx.migrate.analysis import Block, Parsed, dotted

_LEAVING = (cst.Continue, cst.Break, cst.Return, cst.Raise)


def jumps(node: cst.CSTNode, in_loop: bool = False) -> Iterator[cst.CSTNode]:
    """Statements that jump out of ``node``. ``in_loop``: inside a loop within it, whose own jumps do not count."""
    if isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef):
        return
    if isinstance(node, _LEAVING) and not (in_loop and isinstance(node, cst.Continue | cst.Break)):
        yield node
    for child in node.children:
        own = isinstance(node, cst.For | cst.While) and child is node.body
        yield from jumps(child, in_loop or own)


def check_reached(parsed: Parsed, statements: Sequence[cst.CSTNode], step: cst.CSTNode) -> None:
    """Refuses if control may leave ``statements`` after ``unscale_`` and before ``step`` and ``update``."""
    for node in (n for statement in statements for n in jumps(statement)):
        word = type(node).__name__.lower()
        raise flow.refuse(
            parsed, node, f"{word} between scaler.unscale_, which this loop needs, and scaler.step and update"
        )
    for node in parsed.ancestors(step):
        if isinstance(node, cst.FunctionDef):
            return
        if isinstance(node, cst.With) and any(dotted(c.func).endswith("suppress") for c in _contexts(node)):
            raise flow.refuse(parsed, node, "the loop suppresses exceptions between scaler.unscale_ and scaler.step")


def _contexts(block: cst.With) -> Iterator[cst.Call]:
    return (item.item for item in block.items if isinstance(item.item, cst.Call))


def is_zeroed(
    parsed: Parsed, backward: cst.CSTNode, step: cst.CSTNode, is_ours: Callable[[cst.BaseExpression], bool]
) -> bool:
    """Whether gradients are certainly zeroed between ``step`` and the next ``backward``.

    Looks after the step, up to the first jump, and before the backward, both within the innermost loop. ``is_ours``:
    recognizes the optimizer and the model.
    """
    for suite, index in _up_to_loop(parsed, step):
        for statement in suite.body[index + 1 :]:
            if _zeroes(statement, is_ours):
                return True
            if any(True for _ in jumps(statement)):
                return _zeroed_before(parsed, backward, is_ours)
    return _zeroed_before(parsed, backward, is_ours)


def _zeroed_before(parsed: Parsed, backward: cst.CSTNode, is_ours: Callable[[cst.BaseExpression], bool]) -> bool:
    return any(_zeroes(s, is_ours) for suite, index in _up_to_loop(parsed, backward) for s in suite.body[:index])


def _up_to_loop(parsed: Parsed, node: cst.CSTNode) -> Iterator[tuple[Block, int]]:
    for suite, index in parsed.blocks(node):
        yield suite, index
        if isinstance(parsed.parents.get(suite), cst.For | cst.While | cst.FunctionDef):
            return


def _zeroes(statement: cst.CSTNode, is_ours: Callable[[cst.BaseExpression], bool]) -> bool:
    """Whether a statement is an unconditional ``zero_grad()`` of the model or optimizer, or a loop with its effect."""
    if isinstance(statement, cst.For):
        source = statement.iter
        function = source.func if isinstance(source, cst.Call) else None
        of_ours = (
            isinstance(function, cst.Attribute) and function.attr.value == "parameters" and is_ours(function.value)
        )
        body = statement.body.body[0] if len(statement.body.body) == 1 else None
        reset = body.body[0] if isinstance(body, cst.SimpleStatementLine) else None
        if not of_ours or not isinstance(reset, cst.Assign) or not isinstance(reset.value, cst.Name):
            return False
        return reset.value.value == "None" and dotted(reset.targets[0].target) == f"{dotted(statement.target)}.grad"
    for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else []:
        function = small.value.func if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call) else None
        if isinstance(function, cst.Attribute) and function.attr.value == "zero_grad" and is_ours(function.value):
            return True
    return False
