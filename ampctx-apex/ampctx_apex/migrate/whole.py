"""What must hold for a whole file, and the uses of amp outside of its loops."""

from __future__ import annotations

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.migrate import flow, paths
from ampctx_apex.migrate.analysis import Parsed, Use, dotted
from ampctx_apex.migrate.backward import Backward, steps_of
from ampctx_apex.migrate.flow import NotUnderstood, refuse
from ampctx_apex.migrate.loop import Loop
from ampctx_apex.migrate.report import Edit
from ampctx_apex.migrate.session import Session, bound
from ampctx_apex.migrate.to_ampctx import hidden
from ampctx_apex.migrate.variables import Variable, function_of, parameters, variable


def check_torch(parsed: Parsed) -> list[Edit]:
    """Refuses a file in which ``torch`` is not the package. Adds an ``import torch`` that is missing."""
    if hidden(parsed, {"torch"}):
        raise NotUnderstood("the file uses torch as a variable")
    small = [s for line in parsed.tree.body if isinstance(line, cst.SimpleStatementLine) for s in line.body]
    imported = (a for s in small if isinstance(s, cst.Import) for a in s.names if a.asname is None)
    if any(dotted(a.name).split(".")[0] == "torch" for a in imported):
        return []
    imports = [s for s in small if isinstance(s, cst.Import | cst.ImportFrom)]
    place = next((s for s in imports if not parsed.source(s).startswith("from __future__")), None)
    if place is None:
        raise NotUnderstood("the file has no 'import torch' at its top level")
    start = parsed.line_start(parsed.span(place)[0])
    return [Edit(start, start, f"import torch{parsed.tree.default_newline}")]


def check_backwards(parsed: Parsed, backwards: list[Backward]) -> None:
    """Refuses backwards of other losses."""
    known = [c for b in backwards for c in b.calls]
    for node in parsed.nodes:
        name = node.attr.value if isinstance(node, cst.Attribute) else ""
        called = name == "backward" and isinstance(parsed.parents[node], cst.Call)
        if called and not any(node is c for c in known):
            raise refuse(parsed, node, "a second backward")
        if isinstance(node, cst.Attribute) and dotted(node).endswith("autograd.grad"):
            raise refuse(parsed, node, "torch.autograd.grad would see a scaled loss")


def check(parsed: Parsed, session: Session, loops: list[Loop]) -> None:
    """Refuses other names and steps of the optimizers, and a model that moves."""
    functions = [
        session.function,
        *(f for loop in loops for f in [loop.function, *(b.function for b in loop.backwards)]),
    ]
    for optimizer in session.optimizers:
        for node in optimizer.nodes(parsed):
            _check_optimizer(parsed, session, optimizer, node, functions)
        for step in steps_of(parsed, optimizer):
            if not any(step is s for loop in loops for s in loop.steps):
                raise refuse(parsed, step, f"no block of amp.scale_loss belongs to this {optimizer.text}.step()")
    for model in session.models:
        for node in model.nodes(parsed):
            parent = parsed.parents[node]
            attribute = parent.attr.value if isinstance(parent, cst.Attribute) and parent.value is node else ""
            here = function_of(parsed, node) is session.function and parsed.span(node) > parsed.span(session.place)
            if here and attribute in ("to", "cuda", "cpu") and not _stays(parsed, session, model, node):
                raise refuse(parsed, node, f"{model.text} may move to another device after amp.initialize")


def _stays(parsed: Parsed, session: Session, model: Variable, node: cst.CSTNode) -> bool:
    """Whether ``model.to(device)`` was there before amp.initialize, too, or the variable holds another model by now."""
    moves = [parsed.parents[parsed.parents[n]] for n in model.nodes(parsed)]
    text = parsed.source(parsed.parents[parsed.parents[node]])
    if any(parsed.source(m) == text and parsed.span(m) < parsed.span(session.place) for m in moves):
        return True
    before = (s for suite, index in parsed.blocks(node) for s in suite.body[:index])
    later = (s for s in before if parsed.span(s) > parsed.span(session.place))
    return any(model.text in flow.stores(parsed, s) and model.text not in flow.loads(parsed, s) for s in later)


def _check_optimizer(
    parsed: Parsed, session: Session, optimizer: Variable, node: cst.CSTNode, functions: list[cst.CSTNode]
) -> None:
    text = optimizer.text
    if flow.contains(parsed, session.statement, node):
        return
    if optimizer.owner is None and function_of(parsed, node) not in functions:
        raise refuse(parsed, node, f"another function uses {text} and may be its closure")
    load = parsed.contexts.get(node) is meta.ExpressionContext.LOAD
    parent = parsed.parents[node]
    if isinstance(parent, cst.Assign | cst.AnnAssign | cst.NamedExpr) and load and _steps_by(parsed, parent):
        raise refuse(parsed, node, f"{text} gets a second name, which may call step()")
    if not load and not (isinstance(parent, cst.Attribute) and parent.value is node):
        later = parsed.span(node) > parsed.span(session.statement) and not paths.apart(parsed, node, session.statement)
        if later and function_of(parsed, node) is session.function and not _is_handed_back(parsed, optimizer, node):
            raise refuse(parsed, node, f"{text} is assigned again")


def _is_handed_back(parsed: Parsed, optimizer: Variable, target: cst.CSTNode) -> bool:
    """Whether an assignment is ``model, optimizer = load(path, model, optimizer)``: its function gets the optimizer."""
    statement = next(a for a in parsed.ancestors(target) if isinstance(a, cst.BaseSmallStatement | cst.BaseStatement))
    call = statement.value if isinstance(statement, cst.Assign) else None
    return isinstance(call, cst.Call) and any(optimizer.same(parsed, a.value) for a in call.args)


def _steps_by(parsed: Parsed, alias: cst.Assign | cst.AnnAssign | cst.NamedExpr) -> bool:
    """Whether a name that an assignment makes calls ``step``, or may."""
    targets = [t.target for t in alias.targets] if isinstance(alias, cst.Assign) else [alias.target]
    found = [variable(parsed, t) for t in targets]
    attributes = (parsed.parents[n] for v in found if v is not None for n in v.nodes(parsed))
    return None in found or any(isinstance(a, cst.Attribute) and a.attr.value == "step" for a in attributes)


def master_params(parsed: Parsed, session: Session, use: Use) -> Edit:
    assert use.call is not None
    given = list(bound(parsed, use.call, ["optimizer"], "amp.master_params").values())
    own = variable(parsed, given[0]) if len(given) == 1 else None
    local = session.is_local(use.call) and (own is None or own.text not in parameters(function_of(parsed, use.call)))
    ours = bool(given) and any(o.same(parsed, given[0]) for o in session.optimizers)
    if own is None or (local and own.owner is None and not ours):
        raise refuse(parsed, use.call, f"amp.master_params is not called for {session.names}")
    if function_of(parsed, use.call) is session.function and not session.follows(use.call):
        raise refuse(
            parsed, use.call, "amp.master_params does not follow amp.initialize in the same block or a loop in it"
        )
    return Edit(*parsed.span(use.call), f'[p for group in {own.text}.param_groups for p in group["params"]]')


def checkpoint(parsed: Parsed, session: Session, use: Use) -> Edit:
    assert use.call is not None
    name = use.name.removeprefix("apex.amp.")
    if function_of(parsed, use.call) is session.function and not session.follows(use.call):
        raise refuse(parsed, use.call, f"amp.{name} is called where amp.initialize may not have run")
    if len(use.call.args) != (name == "load_state_dict"):
        raise refuse(parsed, use.call, f"amp.{name} has arguments that torch's lacks")
    return Edit(*parsed.span(use.chain), f"{session.scaler}.{name}")
