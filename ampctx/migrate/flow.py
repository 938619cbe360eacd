"""Data flow in a training loop: from batch to loss, from outputs to later lines, into gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst
from libcst import metadata as meta

from ampctx.migrate.analysis import Block, Parsed, dotted
from ampctx.migrate.imports import indent_of
from ampctx.migrate.report import Edit

# Calls that casts do not affect: they move, read or reshape.
_MOVERS = re.compile(
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
_LOGGING = re.compile("append|add_scalar|debug|info|warning|write|format|join|set_description|set_postfix|synchronize")
_PASSING_CALLS = re.compile(r"torch\.(max|min|topk|softmax|sigmoid|sum|mean|abs)|F\.softmax")


class NotUnderstood(Exception):
    """Why a loop is not rewritten."""


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
    return {n.value for n in names(parsed, node) if parsed.contexts.get(n) is meta.ExpressionContext.LOAD}


def stores(parsed: Parsed, node: cst.CSTNode) -> set[str]:
    return {n.value for n in names(parsed, node) if parsed.contexts.get(n) is meta.ExpressionContext.STORE}


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


# --- the forward ------------------------------------------------------------------------------------------------------


class Forward:
    """The statements of a block, ``first`` to ``last``, that compute the loss and go into ``autocast``.

    ``outputs``: variables that may hold 16-bit tensors afterwards, without the loss.

    Raises:
        NotUnderstood: the loss does not come from a model call in this block.
    """

    def __init__(self, parsed: Parsed, suite: Block, index: int, loss: cst.BaseExpression, model: str) -> None:
        body = suite.body
        losses = {n.value for n in names(parsed, loss)}
        needed, leading = set(losses), []
        for i in range(index - 1, -1, -1):
            if (stores(parsed, body[i]) | _grown(body[i])) & needed:
                leading.append(i)
                needed |= loads(parsed, body[i])
        made = [i for i in leading if (stores(parsed, body[i]) | _grown(body[i])) & losses]
        if not made or not any(dotted(c.func) == model for i in leading for c in calls(body[i])):
            raise refuse(parsed, loss, f"found no call of {model}(...) in this block that leads to the loss")
        self.first = min(i for i in leading if _computes(body[i]))
        self.last = max(leading)
        self.statements = [body[i] for i in range(self.first, self.last + 1)]
        self.outputs: set[str] = set()
        for statement in self.statements:
            if _computes(statement) or loads(parsed, statement) & self.outputs:
                self.outputs |= stores(parsed, statement)
        self.outputs -= {n.value for n in names(parsed, loss) if not isinstance(parsed.parents[n], cst.Attribute)}


def _grown(statement: cst.CSTNode) -> set[str]:
    """``losses`` in a statement ``losses.append(...)``."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return set()
    found = (s.value.func for s in statement.body if isinstance(s, cst.Expr) and isinstance(s.value, cst.Call))
    return {f.value.value for f in found if isinstance(f, cst.Attribute) and isinstance(f.value, cst.Name)}


def _computes(statement: cst.CSTNode) -> bool:
    """Whether casts may change the result of a statement."""
    if any(isinstance(n, cst.MatrixMultiply | cst.MatrixMultiplyAssign) for n in below(statement)):
        return True
    return any(not _MOVERS.fullmatch(_last(c.func)) for c in calls(statement))


def _last(function: cst.BaseExpression) -> str:
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def check_inside(parsed: Parsed, statements: Sequence[cst.CSTNode], optimizer: str) -> None:
    """Refuses statements that must not run inside ``autocast``."""
    for node in (n for statement in statements for n in below(statement)):
        if isinstance(node, cst.Yield | cst.Await):
            raise refuse(parsed, node, "yield or await interrupts the forward")
        if isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef):
            raise refuse(parsed, node, "the forward defines a function, which may later run without casts")
        if (
            isinstance(node, cst.Name)
            and node.value == optimizer
            and parsed.scopes.get(node)
            and not is_zero_grad(parsed, node)
        ):
            raise refuse(parsed, node, f"the forward uses {optimizer}")


def check_outputs(parsed: Parsed, forward: Forward, scope: meta.Scope, block: cst.With) -> None:
    """Refuses if a 16-bit output reaches code outside ``autocast``, which apex's casts would have converted."""
    pending, seen = set(forward.outputs), set(forward.outputs)
    while pending:
        local = pending.pop()
        for node in parsed.nodes:
            if not isinstance(node, cst.Name) or node.value != local:
                continue
            if parsed.contexts.get(node) is not meta.ExpressionContext.LOAD or parsed.scopes.get(node) is None:
                continue
            if not any(a.scope is scope for a in parsed.assignments(node)):
                continue
            if any(contains(parsed, s, node) for s in [*forward.statements, block]):
                continue
            further = _goes_to(parsed, node)
            if further is None:
                reason = (
                    f"{local} may be in 16 bits here, after torch's autocast has ended; apex cast it as needed. Pass "
                    f"{local}.float()"
                )
                raise refuse(parsed, node, reason)
            pending |= further - seen
            seen |= further


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


# --- gradients --------------------------------------------------------------------------------------------------------


def readers(parsed: Parsed, model: str, optimizer: str) -> Iterator[cst.CSTNode]:
    """Nodes that read gradients, or receive the model or optimizer and so may read them."""
    for node in parsed.nodes:
        if is_certain(node) and (isinstance(node, cst.Attribute) or parsed.scopes.get(node) is not None):
            yield node
        elif isinstance(node, cst.Name) and node.value in (model, optimizer) and parsed.scopes.get(node) is not None:
            parent = parsed.parents[node]
            attribute = parent.attr.value if isinstance(parent, cst.Attribute) else ""
            if isinstance(parent, cst.Arg | cst.Element) or attribute in (
                "parameters",
                "named_parameters",
                "param_groups",
                "zero_grad",
            ):
                yield node


def unknown_calls(statement: cst.CSTNode) -> Iterator[cst.Call]:
    """Calls that may read gradients they hold from elsewhere."""
    return (c for c in calls(statement) if not (_MOVERS.fullmatch(_last(c.func)) or _LOGGING.fullmatch(_last(c.func))))


def is_certain(node: cst.CSTNode) -> bool:
    name = node.attr.value if isinstance(node, cst.Attribute) else node.value if isinstance(node, cst.Name) else ""
    return (name == "grad" and isinstance(node, cst.Attribute)) or name.startswith("clip_grad")


def is_zero_grad(parsed: Parsed, node: cst.CSTNode) -> bool:
    parent = parsed.parents.get(node)
    return isinstance(parent, cst.Attribute) and parent.value is node and parent.attr.value == "zero_grad"


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
