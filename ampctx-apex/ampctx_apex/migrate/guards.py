"""Conditions around amp, and statements that mean nothing once apex is gone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import libcst as cst

from ampctx_apex.migrate.analysis import Binding, Block, Parsed, Use, dotted
from ampctx_apex.migrate.imports import indent_of
from ampctx_apex.migrate.report import Edit

# Functions that a condition may call: they change nothing and read no gradients.
_READERS = re.compile(r"len|bool|int|getattr|hasattr|isinstance|.*\.is_available|.*\.get|(\w+\.)*is_apex_available")
_AVAILABLE = re.compile(r"(\w+\.)*is_apex_available")
_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception"}


def is_pure(node: cst.CSTNode) -> bool:
    """Whether a condition only reads: variables, attributes, items, comparisons and a few functions."""
    if isinstance(node, cst.Call) and not _READERS.fullmatch(dotted(node.func)):
        return False
    if isinstance(node, cst.NamedExpr | cst.Await | cst.Yield | cst.Lambda | cst.BaseComp):
        return False
    return all(is_pure(child) for child in node.children)


def both(conditions: Collection[str]) -> str:
    """All of these conditions as one expression."""
    parts = [f"({c})" if len(conditions) > 1 and re.search(r"\b(or|if|lambda)\b", c) else c for c in conditions]
    return " and ".join(parts)


def as_bool(conditions: Sequence[str]) -> str:
    """The conditions as True or False."""
    text = both(conditions)
    known = r"(not [\w.]+|True|False|.* (in|is|not|==|!=|<|>|<=|>=) [^()]*)"
    plain = all(re.fullmatch(known, c) and not re.search(r"\b(and|or|if)\b", c) for c in conditions)
    return text if plain else f"bool({text})"


def opposite(condition: str) -> str:
    if re.fullmatch(r"not [\w.]+", condition):
        return condition.removeprefix("not ")
    return f"not {condition}" if re.fullmatch(r"[\w.]+", condition) else f"not ({condition})"


def branch_condition(parsed: Parsed, suite: Block) -> tuple[cst.If, list[str]] | None:
    """The first ``if`` of the chain that a suite is a branch of, and the conditions under which the branch runs."""
    owner = parsed.parents.get(suite)
    conditions: list[str] = []
    if isinstance(owner, cst.Else):
        owner = parsed.parents[owner]
        if not isinstance(owner, cst.If):
            return None
        conditions.append(opposite(parsed.source(owner.test)))
    elif isinstance(owner, cst.If):
        conditions.append(parsed.source(owner.test))
    else:
        return None
    while isinstance(above := parsed.parents[owner], cst.If) and above.orelse is owner:
        owner = above
        conditions.insert(0, opposite(parsed.source(owner.test)))
    return owner, conditions


def chain(head: cst.If) -> Iterator[cst.If | cst.Else]:
    """The branches of an ``if``, its ``elif`` and ``else``."""
    link: cst.If | cst.Else | None = head
    while link is not None:
        yield link
        link = link.orelse if isinstance(link, cst.If) else None


# --- tests of amp -----------------------------------------------------------------------------------------------------


def is_replaced_when_missing(parsed: Parsed, use: Use, bindings: Collection[Binding]) -> bool:
    """Whether apart from apex's imports a name is only assigned ``None`` or ``False``, before or where they fail."""
    imports = {id(b.statement) for b in bindings}
    first = min((parsed.span(b.statement) for b in bindings if b.local == use.root.value), default=(0, 0))
    for assignment in parsed.assignments(use.root):
        node = getattr(assignment, "node", None)
        if id(node) in imports:
            continue
        if isinstance(node, cst.ImportFrom) and parsed.source(node).startswith("from torch.nn"):
            # Both names become torch's.
            if any(isinstance(a, cst.ExceptHandler) for a in parsed.ancestors(node)):
                continue
            return False
        statement = parsed.parents[parsed.parents[node]] if isinstance(node, cst.Name) else None
        if not isinstance(statement, cst.Assign) or parsed.source(statement.value) not in ("None", "False"):
            return False
        in_handler = any(isinstance(a, cst.ExceptHandler) for a in parsed.ancestors(statement))
        if not in_handler and parsed.span(statement) > first:
            return False
    return True


def tested(parsed: Parsed, use: Use) -> Edit | None:
    """The value of a test for amp once it is there: ``amp is None`` is False. None for other uses."""
    parent = parsed.parents[use.chain]
    if isinstance(parent, cst.Comparison) and parent.left is use.chain and len(parent.comparisons) == 1:
        operator, other = parent.comparisons[0].operator, parsed.source(parent.comparisons[0].comparator)
        if other == "None" and isinstance(operator, cst.Is | cst.Equal):
            return Edit(*parsed.span(parent), "False")
        if other == "None" and isinstance(operator, cst.IsNot | cst.NotEqual):
            return Edit(*parsed.span(parent), "True")
    if isinstance(parent, cst.If | cst.IfExp | cst.Assert) and parent.test is use.chain:
        return Edit(*parsed.span(use.chain), "True")
    if isinstance(parent, cst.BooleanOperation):
        return Edit(*parsed.span(use.chain), "True")
    if isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not):
        return Edit(*parsed.span(parent), "False")
    return None


def availability(parsed: Parsed) -> list[Edit]:
    """``is_apex_available()`` becomes True: the code behind it no longer needs apex."""
    found = (n for n in parsed.nodes if isinstance(n, cst.Call) and not n.args and _AVAILABLE.fullmatch(dotted(n.func)))
    return [Edit(*parsed.span(node), "True") for node in found]


def is_cast_anyway(parsed: Parsed, use: Use) -> bool:
    """Whether a use is ``amp.register_half_function(torch, "einsum")`` or another function that autocast casts."""
    if use.name != "apex.amp.register_half_function" or use.call is None:
        return False
    known = {f'torch, "{name}"' for name in ("einsum", "matmul", "bmm", "mm", "baddbmm", "addmm", "conv1d", "conv2d")}
    arguments = ", ".join(parsed.arguments(use.call) or ()).replace("'", '"')
    return arguments in known and isinstance(parsed.parents[use.call], cst.Expr)


def first_scale(parsed: Parsed, use: Use) -> cst.Assign | None:
    """The statement ``amp._amp_state.loss_scalers[0]._loss_scale = ...`` that a use is the target of."""
    if use.name != "apex.amp._amp_state.loss_scalers":
        return None
    statement = next((a for a in parsed.ancestors(use.root) if isinstance(a, cst.Assign)), None)
    target = parsed.source(use.chain) + "[0]._loss_scale"
    if statement is None or [parsed.source(t.target) for t in statement.targets] != [target]:
        return None
    return statement if is_pure(statement.value) else None


def read_scale(parsed: Parsed, use: Use) -> cst.CSTNode | None:
    """The node ``amp._amp_state.loss_scalers[0].loss_scale()``, or ``._loss_scale``, that a use is part of."""
    item = parsed.parents[use.chain]
    attribute = parsed.parents[item]
    if use.name != "apex.amp._amp_state.loss_scalers" or not isinstance(attribute, cst.Attribute):
        return None
    if not re.fullmatch(r"\[0\]\._?loss_scale", parsed.source(attribute)[len(parsed.source(use.chain)) :]):
        return None
    if isinstance(parsed.parents[attribute], cst.AssignTarget | cst.AugAssign | cst.Del):
        return None
    if attribute.attr.value == "_loss_scale":
        return attribute
    call = parsed.parents[attribute]
    return call if isinstance(call, cst.Call) and call.func is attribute and not call.args else None


# --- statements that go -----------------------------------------------------------------------------------------------


class Dead:
    """Finds statements that only import apex, or that only say that it is missing.

    ``gone``: import statements all of whose names go, and other statements that go.
    """

    def __init__(self, parsed: Parsed, gone: Collection[cst.CSTNode], tests: Collection[cst.CSTNode] = ()) -> None:
        self._parsed = parsed
        self._gone = {id(node) for node in gone}
        self._tests = {id(node) for node in tests}

    def add(self, statement: cst.CSTNode) -> None:
        self._gone.add(id(statement))

    def is_dead(self, statement: cst.CSTNode) -> bool:
        if isinstance(statement, cst.SimpleStatementLine):
            return all(id(small) in self._gone for small in statement.body)
        if isinstance(statement, cst.Try):
            return self.flags(statement) == []
        if isinstance(statement, cst.If) and statement.orelse is None:
            body = statement.body.body
            if self._asks_missing(statement.test):
                return all(isinstance(s, cst.SimpleStatementLine) and isinstance(s.body[0], cst.Raise) for s in body)
            return is_pure(statement.test) and all(self.is_dead(s) for s in body)
        return False

    def _asks_missing(self, test: cst.BaseExpression) -> bool:
        """``not is_apex_available()``, ``amp is None``."""
        if isinstance(test, cst.Comparison):
            none = len(test.comparisons) == 1 and isinstance(test.comparisons[0].operator, cst.Is)
            return none and id(test.left) in self._tests
        if not isinstance(test, cst.UnaryOperation) or not isinstance(test.operator, cst.Not):
            return False
        asked = test.expression
        return id(asked) in self._tests or (
            isinstance(asked, cst.Call) and bool(_AVAILABLE.fullmatch(dotted(asked.func)))
        )

    def flags(self, statement: cst.Try) -> list[str] | None:
        """The assignments, such as ``HAS_APEX = True``, that stay of a ``try`` around imports of apex.

        None if it does more.
        """
        if statement.finalbody is not None or any(not _catches_import(h) for h in statement.handlers):
            return None
        # What handlers do no longer happens, unless it is the whole of a name's definition.
        flags, dead = [], False
        for line in [*statement.body.body, *(statement.orelse.body.body if statement.orelse else [])]:
            if self.is_dead(line):
                dead = True
                continue
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
            if not isinstance(small, cst.Assign) or self._parsed.source(small.value) not in ("True", "False"):
                return None
            flags.append(self._parsed.source(small))
        return flags if dead else None

    def edits(self) -> list[Edit]:
        """Edits that remove each whole statement that is dead, with the ``if`` or ``try`` around it if that is, too."""
        found: list[Edit] = []
        self._remove_from(self._parsed.tree, found)
        return found

    def _remove_from(self, node: cst.CSTNode, found: list[Edit]) -> None:
        if isinstance(node, cst.Module | cst.IndentedBlock):
            dead = [s for s in node.body if self.is_dead(s)]
            for i, statement in enumerate(dead):
                left = "pass" if isinstance(node, cst.IndentedBlock) and len(dead) == len(node.body) and i == 0 else ""
                found.append(_without(self._parsed, statement, left))
            for statement in node.body:
                if statement in dead:
                    continue
                if isinstance(statement, cst.Try) and (flags := self.flags(statement)):
                    newline = self._parsed.tree.default_newline + indent_of(self._parsed, statement)
                    found.append(Edit(*self._parsed.span(statement), newline.join(flags)))
                else:
                    self._remove_from(statement, found)
        elif not isinstance(node, cst.SimpleStatementLine | cst.SimpleStatementSuite):
            for child in node.children:
                if isinstance(child, cst.BaseCompoundStatement | Block | cst.Else | cst.ExceptHandler | cst.Finally):
                    self._remove_from(child, found)


def _catches_import(handler: cst.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type
    caught = [e.value for e in types.elements] if isinstance(types, cst.Tuple) else [types]
    return all(dotted(t) in _IMPORT_ERRORS for t in caught)


def _without(parsed: Parsed, statement: cst.CSTNode, left: str) -> Edit:
    start, end = parsed.span(statement)
    if left:
        return Edit(start, end, left)
    start = parsed.line_start(start)
    # With the blank lines after it, if there are some before it.
    blank = re.search(r"(\A|\n[ \t]*\r?\n)\Z", parsed.text[:start]) is not None
    rest = re.compile(r"[^\r\n]*(\r\n?|\n|\Z)" + (r"([ \t]*(\r\n?|\n))*" if blank else "")).match(parsed.text, end)
    assert rest is not None
    return Edit(start, rest.end(), "")
