"""Control flow in a training loop: a scaler must see ``unscale_``, ``step`` and ``update`` together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import libcst as cst

from ampctx_apex.migrate import flow, guards
from ampctx_apex.migrate.analysis import Block, Parsed, dotted
from ampctx_apex.migrate.variables import function_of, parameters

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


def exclusive(parsed: Parsed, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two nodes are on different branches of an ``if`` that goes the same way in each round of a loop."""
    branches = dict(_branches(parsed, one))
    for head, suite in _branches(parsed, other):
        if branches.get(head, suite) is not suite:
            return _is_constant(parsed, head)
    return False


def apart(parsed: Parsed, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two nodes are on different branches of an ``if``."""
    branches = dict(_branches(parsed, one))
    return any(branches.get(head, suite) is not suite for head, suite in _branches(parsed, other))


def _branches(parsed: Parsed, node: cst.CSTNode) -> Iterator[tuple[cst.If, Block]]:
    """Each ``if`` around a node, with the branch that holds it."""
    for suite, _ in parsed.blocks(node):
        if (found := guards.branch_condition(parsed, suite)) is not None:
            yield found[0], suite


def _is_constant(parsed: Parsed, head: cst.If) -> bool:
    """Whether conditions only read variables, attributes and items that no loop around them, or other method, sets."""
    tests = [link.test for link in guards.chain(head) if isinstance(link, cst.If)]
    if not all(guards.is_pure(t) for t in tests) or any(True for t in tests for c in flow.calls(t) if _may_vary(c)):
        return False
    plain = {n.value for t in tests for n in flow.names(parsed, t)}
    read = plain | {dotted(n) for t in tests for n in flow.below(t) if isinstance(n, cst.Attribute)}
    loops = [a for a in parsed.ancestors(head) if isinstance(a, cst.For | cst.While)]
    function = function_of(parsed, head)
    if not any(flow.contains(parsed, function, loop) for loop in loops):
        # Each round may be a call of this function.
        roots = {n.split(".")[0] for n in read - plain}
        if plain & (set(parameters(function)) | flow.stores(parsed, function)) - roots:
            return False
    if any(plain & flow.stores(parsed, loop) for loop in loops):
        return False
    targets = (n for n in parsed.nodes if isinstance(n, cst.AssignTarget | cst.AugAssign | cst.AnnAssign))
    set_elsewhere = (
        dotted(t.target.value if isinstance(t.target, cst.Subscript) else t.target)
        for t in targets
        if isinstance(t.target, cst.Attribute | cst.Subscript) and not _is_made(parsed, t)
    )
    return not any(name in read for name in set_elsewhere)


def _may_vary(call: cst.Call) -> bool:
    """Whether a call may have another result later, though its arguments are the same objects."""
    return dotted(call.func) not in ("bool", "int", "isinstance", "hasattr", "getattr")


def _is_made(parsed: Parsed, node: cst.CSTNode) -> bool:
    """Whether a node is in a function that sets up an object, or outside of loops at the top of the program."""
    function = function_of(parsed, node)
    if isinstance(function, cst.FunctionDef) and function.name.value in ("__init__", "main", "parse_args"):
        return True
    return not isinstance(function, cst.FunctionDef) and not any(
        isinstance(a, cst.For | cst.While) for a in parsed.ancestors(node)
    )


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
