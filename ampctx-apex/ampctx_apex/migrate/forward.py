"""The forward of a loop: which statements lead to the loss, and where 16-bit outputs go after it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.migrate import flow
from ampctx_apex.migrate.analysis import Block, Parsed, dotted
from ampctx_apex.migrate.flow import NotUnderstood, below, calls, contains, loads, names, refuse, stores
from ampctx_apex.migrate.report import Edit
from ampctx_apex.migrate.variables import Variable, function_of

# Calls that casts do not affect: they move, read or reshape.
MOVERS = re.compile(
    "to|cuda|cpu|float|double|long|int|bool|view|reshape|unsqueeze|squeeze|permute|transpose|t|contiguous|size|dim|numel|"
    "item|requires_grad_|detach|keys|values|items|get|next|len|range|enumerate|isinstance|time|perf_counter|zero_grad|"
    "train|eval|print|update|randn|rand|randint|randperm|zeros|ones|full|empty|tensor|arange|from_numpy|manual_seed"
)
# Methods whose result is never 16-bit, and methods that pass a 16-bit tensor on; attributes and functions likewise.
_FINAL = re.compile(
    "item|float|double|long|int|bool|tolist|numpy|size|dim|numel|argmax|argmin|eq|ne|gt|lt|ge|le|isnan|isfinite|isinf"
)
_PASSING = re.compile(
    "detach|cpu|cuda|to|clone|view|reshape|flatten|squeeze|unsqueeze|permute|transpose|t|contiguous|max|min|topk|sort|sum|"
    "mean|softmax|log_softmax|sigmoid|exp|abs|clamp"
)
_FINAL_ATTRIBUTES = re.compile("shape|dtype|device|ndim|requires_grad|grad_fn")
_FINAL_CALLS = re.compile(
    r"float|int|bool|len|print|str|repr|isinstance|math\.(isnan|isfinite|isinf)|"
    r"torch\.(isnan|isfinite|isinf|argmax|is_tensor)"
)
_PASSING_CALLS = re.compile(r"torch\.(max|min|topk|softmax|sigmoid|sum|mean|abs)|F\.softmax")
# Functions of a loss, not of the model.
LOSSES = re.compile("crit|loss|metric|accuracy", re.IGNORECASE)
_GROWING = re.compile("append|extend|insert|add")


class Run(NamedTuple):
    """Statements ``first`` to ``last`` of a block."""

    suite: Block
    first: int
    last: int

    @property
    def statements(self) -> list[cst.CSTNode]:
        return list(self.suite.body[self.first : self.last + 1])


class Forward:
    """The statements before ``anchor`` that compute the loss and go into ``autocast``.

    Looks in the block that holds ``anchor`` and in the blocks around it, up to the innermost loop or the function.
    ``start``: the statement that makes the scaler; the forward comes after it. ``apart``: nodes that stay outside of
    ``autocast``, such as other backwards. ``names``: the variables of the loss.
    ``outputs``: variables that may hold 16-bit tensors afterwards, without the loss.

    Raises:
        NotUnderstood: a statement must not run inside ``autocast``.
    """

    def __init__(
        self,
        parsed: Parsed,
        anchor: cst.CSTNode,
        loss: cst.BaseExpression,
        optimizers: Collection[Variable],
        start: cst.CSTNode,
        apart: Collection[cst.CSTNode] = (),
    ) -> None:
        self._parsed, self._anchor, self._optimizers, self._apart = parsed, anchor, optimizers, apart
        self.names = _variables(parsed, loss)
        self.runs: list[Run] = []
        self.made = False
        self.leading: list[cst.CSTNode] = []
        needed = set(self.names)
        for suite, index in around(parsed, anchor):
            needed = self._read_suite(suite, index, start, needed)
        self.statements = [s for run in self.runs for s in run.statements]
        for statement in self.statements:
            self._check_inside(statement)
        self.outputs: set[str] = set()
        for statement in sorted(self.statements, key=parsed.span):
            if _computes(statement) or loads(parsed, statement) & self.outputs:
                self.outputs |= stores(parsed, statement)
        self.outputs -= {n for n in self.names if not isinstance(loss, cst.Attribute | cst.Subscript)}
        self.outputs -= {n for n in self.outputs if n.startswith("self.") and n in self.names}

    def _read_suite(self, suite: Block, index: int, start: cst.CSTNode, needed: set[str]) -> set[str]:
        parsed, leading = self._parsed, []
        for i in range(index - 1, -1, -1):
            if suite.body[i] is start:
                break
            made = stores(parsed, suite.body[i]) | _grown(suite.body[i])
            if made & needed:
                leading.append(i)
                self.made = self.made or bool(made & self.names)
                needed = needed | loads(parsed, suite.body[i])
        self.leading += [suite.body[i] for i in leading]
        computing = [i for i in leading if _computes(suite.body[i])]
        if computing:
            self._split(suite, min(computing), max(leading), set(leading))
        return needed

    def _split(self, suite: Block, first: int, last: int, leading: set[int]) -> None:
        """Adds the statements as one run; as several if others between them must stay outside of autocast."""
        begin = first
        for i in range(first, last + 1):
            if i in leading or self._may_be_inside(suite.body[i]):
                continue
            if begin < i:
                self.runs.append(Run(suite, begin, max(j for j in leading if j < i)))
            begin = min(j for j in leading if j > i)
        self.runs.append(Run(suite, begin, last))

    def _may_be_inside(self, statement: cst.CSTNode) -> bool:
        try:
            self._check_inside(statement)
        except NotUnderstood:
            return False
        return True

    def _check_inside(self, statement: cst.CSTNode) -> None:
        """Refuses statements that must not run inside ``autocast``."""
        parsed = self._parsed
        for node in below(statement):
            if isinstance(node, cst.Yield | cst.Await):
                raise refuse(parsed, node, "yield or await interrupts the forward")
            if isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef):
                raise refuse(parsed, node, "the forward defines a function, which may later run without casts")
            for optimizer in self._optimizers:
                if optimizer.same(parsed, node) and not is_zero_grad(parsed, node):
                    raise refuse(parsed, node, f"the forward uses {optimizer.text}")
            if any(node is a for a in self._apart):
                raise refuse(parsed, node, "another backward is part of the forward")

    def calls_model(self, models: set[str]) -> bool:
        """Whether the statements call one of these models, or hand one to a function or method that may."""
        for call in (c for statement in self.statements for c in calls(statement)):
            name = dotted(call.func)
            if name in models or any(name.startswith(f"{m}.") for m in models):
                return True
            if name.startswith("self.") and not LOSSES.search(name):
                return True
            if any(dotted(a.value) in models for a in call.args):
                return True
        return False

    def calls_directly(self, model: str) -> bool:
        called = (dotted(c.func) for s in self.statements for c in calls(s))
        return any(name == model or name.startswith(f"{model}.") for name in called)

    # --- outputs ------------------------------------------------------------------------------------------------------

    def late(self, known: Collection[cst.CSTNode]) -> list[Run]:
        """Statements after the forward that use its 16-bit outputs, as apex cast them there, too.

        ``known``: other forwards, and the backwards.

        Raises:
            NotUnderstood: an output leaves the function.
        """
        with flow.about("outputs"):
            return self._late(known)

    def _late(self, known: Collection[cst.CSTNode]) -> list[Run]:
        parsed = self._parsed
        function = function_of(parsed, self._anchor)
        pending, seen = set(self.outputs), set(self.outputs)
        found: list[cst.CSTNode] = []
        while pending:
            local = pending.pop()
            for node in _reads(parsed, function, local):
                if any(contains(parsed, s, node) for s in [*self.statements, *found, *known]):
                    continue
                further = _goes_to(parsed, node)
                if further is None:
                    statement = self._late_statement(node, local)
                    found.append(statement)
                    further = stores(parsed, statement) | _grown(statement)
                pending |= further - seen
                seen |= further
        return _joined(parsed, found)

    def _late_statement(self, node: cst.CSTNode, local: str) -> cst.CSTNode:
        parsed = self._parsed
        statement = next(a for a in parsed.ancestors(node) if isinstance(a, cst.BaseStatement))
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        kinds = (cst.Expr, cst.Assign, cst.AugAssign, cst.AnnAssign)
        kept = {n for n in stores(parsed, statement) if n.startswith("self.")} or any(
            _GROWING.fullmatch(last_name(c.func)) and not isinstance(_receiver(c), cst.Name) for c in calls(statement)
        )
        nested = isinstance(parsed.parents.get(statement), cst.SimpleStatementSuite)
        if not isinstance(small, kinds) or kept or nested or not self._may_be_inside(statement):
            reason = (
                f"{local} may be in 16 bits here, after torch's autocast has ended; apex cast it as needed. Pass "
                f"{local}.float()"
            )
            raise refuse(parsed, node, reason)
        return statement


def around(parsed: Parsed, node: cst.CSTNode) -> Iterator[tuple[Block, int]]:
    """The blocks that hold a node, innermost first, up to the innermost loop or the function."""
    for suite, index in parsed.blocks(node):
        yield suite, index
        if isinstance(parsed.parents.get(suite), cst.For | cst.While | cst.FunctionDef | cst.ClassDef):
            return


def _variables(parsed: Parsed, loss: cst.BaseExpression) -> set[str]:
    attributes = {dotted(n) for n in below(loss) if isinstance(n, cst.Attribute) and dotted(n).startswith("self.")}
    return attributes or {n.value for n in names(parsed, loss)}


def _reads(parsed: Parsed, function: cst.CSTNode, local: str) -> Iterator[cst.CSTNode]:
    for node in parsed.nodes:
        if isinstance(node, cst.Name) and node.value == local and parsed.scopes.get(node) is None:
            continue
        if not isinstance(node, cst.Name | cst.Attribute) or dotted(node) != local:
            continue
        if parsed.contexts.get(node) is not meta.ExpressionContext.LOAD:
            continue
        if isinstance(node, cst.Name) and not _assigned_in(parsed, node, function):
            continue
        yield node


def _assigned_in(parsed: Parsed, name: cst.Name, function: cst.CSTNode) -> bool:
    """Whether a name may have been assigned in a function."""
    nodes = (getattr(a, "node", None) for a in parsed.assignments(name))
    return any(n is not None and function_of(parsed, n) is function for n in nodes if n is not parsed.tree)


def _joined(parsed: Parsed, statements: list[cst.CSTNode]) -> list[Run]:
    """The statements as runs: neighbours of one block together."""
    runs: list[Run] = []
    for statement in sorted(statements, key=parsed.span):
        suite, index = parsed.blocks(statement)[0]
        if runs and runs[-1].suite is suite and runs[-1].last == index - 1:
            runs[-1] = runs[-1]._replace(last=index)
        else:
            runs.append(Run(suite, index, index))
    return runs


def merged(parsed: Parsed, runs: Collection[Run]) -> list[Run]:
    """The runs of several forwards, without what they share. A statement within another is in the other's run."""
    held = {id(s): s for run in runs for s in run.statements}
    outer = [s for s in held.values() if not any(id(a) in held for a in parsed.ancestors(s))]
    return _joined(parsed, outer)


def wrapped(parsed: Parsed, run: Run, header: str) -> list[Edit]:
    return flow.wrapped(parsed, run.suite.body[run.first], run.suite.body[run.last], header)


def is_zero_grad(parsed: Parsed, node: cst.CSTNode) -> bool:
    parent = parsed.parents.get(node)
    return isinstance(parent, cst.Attribute) and parent.value is node and parent.attr.value == "zero_grad"


def _receiver(call: cst.Call) -> cst.BaseExpression | None:
    return call.func.value if isinstance(call.func, cst.Attribute) else None


def _grown(statement: cst.CSTNode) -> set[str]:
    """``losses`` in a statement ``losses.append(...)``."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return set()
    found = (s.value for s in statement.body if isinstance(s, cst.Expr) and isinstance(s.value, cst.Call))
    return {r.value for c in found if isinstance(r := _receiver(c), cst.Name) and _GROWING.fullmatch(last_name(c.func))}


def _computes(statement: cst.CSTNode) -> bool:
    """Whether casts may change the result of a statement."""
    if any(isinstance(n, cst.MatrixMultiply | cst.MatrixMultiplyAssign) for n in below(statement)):
        return True
    return any(not MOVERS.fullmatch(last_name(c.func)) for c in calls(statement))


def last_name(function: cst.BaseExpression) -> str:
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def _goes_to(parsed: Parsed, node: cst.CSTNode) -> set[str] | None:
    """The variables that receive a value; None if it cannot be traced."""
    while True:
        child, node = node, parsed.parents[node]
        if isinstance(node, cst.Attribute):
            call = parsed.parents[node]
            if not (isinstance(call, cst.Call) and call.func is node):
                if _FINAL_ATTRIBUTES.fullmatch(node.attr.value):
                    return set()
            elif _FINAL.fullmatch(node.attr.value):
                return set()
            elif _PASSING.fullmatch(node.attr.value):
                node = call
            else:
                return None
        elif isinstance(node, cst.Arg):
            call = parsed.parents[node]
            function = dotted(call.func) if isinstance(call, cst.Call) else ""
            if _FINAL_CALLS.fullmatch(function):
                return set()
            if not _PASSING_CALLS.fullmatch(function):
                return None
            node = call
        elif isinstance(node, cst.Assign | cst.AugAssign):
            to = [t.target for t in node.targets] if isinstance(node, cst.Assign) else [node.target]
            elements = [e.value for t in to if isinstance(t, cst.Tuple) for e in t.elements]
            variables = [t for t in [*to, *elements] if not isinstance(t, cst.Tuple)]
            found = {v.value for v in variables if isinstance(v, cst.Name)}
            return found if all(isinstance(v, cst.Name) for v in variables) else None
        elif isinstance(
            node, cst.Comparison | cst.ComparisonTarget | cst.FormattedStringExpression | cst.Expr | cst.Del
        ):
            return set()
        elif isinstance(node, cst.BinaryOperation) and not isinstance(node.operator, cst.MatrixMultiply):
            continue
        elif not (isinstance(node, cst.Subscript) and node.value is child) and not isinstance(node, cst.UnaryOperation):
            return None
