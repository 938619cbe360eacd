"""Who reads gradients, which torch's scaler leaves scaled until ``unscale_`` or ``step``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import libcst as cst

from ampctx_apex.migrate.analysis import Parsed, dotted
from ampctx_apex.migrate.flow import calls, names
from ampctx_apex.migrate.forward import MOVERS, last_name
from ampctx_apex.migrate.variables import call_sites, function_of

_LOGGING = re.compile(
    "append|add_scalar|debug|info|warning|write|format|join|set_description|set_postfix|synchronize|value|result|reset|"
    "get_lr|get_last_lr|flush|close|mean|sum|empty_cache|barrier|str|no_sync|loss_scale|get_scale|fill_|normal_|uniform_|random_|resize_"
)
_ARITHMETIC = re.compile(r"round|min|max|abs|(np|numpy|math)\.\w+")
# Functions that evaluate or save a model, or ask what it is.
_HARMLESS = re.compile(
    r"(evaluate|eval|validate|valid|test|predict|infer|save|load|unwrap)(_\w+)?|hasattr|getattr|isinstance|type|id|super"
)
_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value"}
# Functions that return the norm of gradients.
_NORMS = re.compile(r"(get|calc|calculate|compute)?_?(total_)?grad(ient)?s?_norm_?")


def certain(parsed: Parsed, function: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Nodes of a function that read gradients: ``.grad``, functions that clip, calls of functions that do so."""
    for node in parsed.nodes:
        if not _is_certain(parsed, node):
            continue
        yield from sites(parsed, node, function)


def sites(parsed: Parsed, node: cst.CSTNode, function: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Where a function runs a node: the node itself, if it is there, else calls that lead to it."""
    inside = function_of(parsed, node)
    if inside is function:
        yield node
        return
    seen = {inside}
    pending = [inside]
    while pending:
        for call in call_sites(parsed, pending.pop()):
            caller = function_of(parsed, call)
            if caller is function:
                yield call
            elif caller not in seen:
                seen.add(caller)
                pending.append(caller)


def _is_certain(parsed: Parsed, node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Attribute):
        return (node.attr.value == "grad" and not is_reset(parsed, node)) or node.attr.value in _CLIPS
    if not isinstance(node, cst.Name) or node.value not in _CLIPS or parsed.scopes.get(node) is None:
        return False
    return not isinstance(parsed.parents[node], cst.ImportAlias | cst.AsName | cst.Attribute)


def is_reset(parsed: Parsed, node: cst.CSTNode) -> bool:
    """Whether a node is the target of ``p.grad = None``."""
    target = parsed.parents[node]
    assignment = parsed.parents.get(target)
    if not isinstance(target, cst.AssignTarget) or not isinstance(assignment, cst.Assign):
        return False
    return parsed.source(assignment.value) == "None"


def receivers(parsed: Parsed, function: cst.CSTNode, variables: Collection[str]) -> Iterator[cst.CSTNode]:
    """Nodes of a function that hand these variables on to code that may read gradients, or zero them."""
    for node in parsed.nodes:
        if not isinstance(node, cst.Name | cst.Attribute) or dotted(node) not in variables:
            continue
        if isinstance(node, cst.Name) and parsed.scopes.get(node) is None:
            continue
        parent = parsed.parents[node]
        attribute = parent.attr.value if isinstance(parent, cst.Attribute) and parent.value is node else ""
        handed = isinstance(parent, cst.Arg | cst.Element) and not (
            isinstance(parent, cst.Arg) and parent.keyword is not None and parent.keyword is node
        )
        reads = attribute in ("parameters", "named_parameters", "param_groups", "zero_grad")
        if handed and isinstance(parent, cst.Arg) and _trusted(parsed, parsed.parents[parent]):
            continue
        if (handed or reads) and function_of(parsed, node) is function:
            yield node


def _trusted(parsed: Parsed, call: cst.CSTNode) -> bool:
    """Whether a function that gets the model or optimizer reads no gradients.

    Functions of this file are known: ``certain`` finds those that do. Others are trusted by name.
    """
    if not isinstance(call, cst.Call):
        return False
    if _HARMLESS.fullmatch(last_name(call.func)):
        return True
    return any(call is site for f in parsed.nodes if isinstance(f, cst.FunctionDef) for site in call_sites(parsed, f))


def unknown_calls(parsed: Parsed, statement: cst.CSTNode, known: Collection[str]) -> Iterator[cst.Call]:
    """Calls that may read gradients they hold from elsewhere. ``known``: variables of the batch, without gradients."""
    for call in calls(statement):
        name = last_name(call.func)
        if MOVERS.fullmatch(name) or _LOGGING.fullmatch(name) or _ARITHMETIC.fullmatch(dotted(call.func)):
            continue
        given = {n.value for a in call.args for n in names(parsed, a.value)}
        if not given or not given <= set(known):
            yield call


def clip(parsed: Parsed, node: cst.CSTNode) -> tuple[cst.Call, cst.BaseExpression | None] | None:
    """The call of ``clip_grad_norm_``, ``clip_grad_value_`` or a function such as ``get_grad_norm`` that a node is part
    of, and the bound of the clipping.

    None for other readers of gradients.
    """
    calls = [n for n in [node, *parsed.ancestors(node)] if isinstance(n, cst.Call)]
    call = next((c for c in calls if last_name(c.func) in _CLIPS or _NORMS.fullmatch(last_name(c.func))), None)
    if call is None or any(a.star for a in call.args):
        return None
    if last_name(call.func) not in _CLIPS:
        return call, None
    for i, argument in enumerate(call.args):
        named = argument.keyword is not None and argument.keyword.value in ("max_norm", "clip_value")
        if named or (argument.keyword is None and i == 1):
            return call, argument.value
    return None
