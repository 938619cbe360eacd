"""``amp.initialize``: what it is called for, on which conditions, and the ``GradScaler`` that takes its place."""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.migrate import flow, guards, options
from ampctx_apex.migrate.analysis import Block, Parsed, Use, dotted
from ampctx_apex.migrate.flow import NotUnderstood
from ampctx_apex.migrate.imports import indent_of
from ampctx_apex.migrate.report import Edit
from ampctx_apex.migrate.variables import Variable, class_of, function_of, related, variable

_INITIALIZE = ["models", "optimizers", "enabled", "opt_level"]
_MOVES = ("to", "cuda", "cpu")


def bound(parsed: Parsed, call: cst.Call, names: list[str], what: str) -> dict[str, cst.BaseExpression]:
    """The arguments of a call by parameter name."""
    given: dict[str, cst.BaseExpression] = {}
    for i, argument in enumerate(call.args):
        if argument.star or (argument.keyword is None and i >= len(names)):
            raise flow.refuse(parsed, call, f"cannot match the arguments of {what} to its parameters")
        given[names[i] if argument.keyword is None else argument.keyword.value] = argument.value
    return given


def without_optimizer(parsed: Parsed, use: Use) -> cst.CSTNode | None:
    """The statement ``model = amp.initialize(model)``, for evaluation. torch needs none: it casts in autocast only."""
    assert use.call is not None
    given = bound(parsed, use.call, _INITIALIZE, "amp.initialize")
    statement = parsed.parents[use.call]
    if "optimizers" in given and parsed.source(given["optimizers"]) != "None":
        return None
    models = parsed.source(given["models"]) if "models" in given else ""
    if isinstance(statement, cst.Assign) and [parsed.source(t.target) for t in statement.targets] == [models]:
        return statement
    return statement if isinstance(statement, cst.Expr) else None


class Session:
    """A call of ``amp.initialize``, or ``calls`` of it that follow each other.

    ``uses``: the other uses of amp in the file. ``first``: the statement that sets the first loss scale.
    ``statement``: the line of the call. ``edits`` replace it, or make the scaler before the condition that it runs on.

    Raises:
        NotUnderstood: the call cannot be replaced; with the line and the reason.
    """

    def __init__(
        self,
        parsed: Parsed,
        calls: list[cst.Call],
        uses: Collection[Use],
        dead: guards.Dead,
        first: cst.Assign | None = None,
    ) -> None:
        self._parsed = parsed
        self.dead = dead
        self.call = call = calls[0]
        self.function = function_of(parsed, call)
        with flow.about("initialize"):
            self._given = bound(parsed, call, _INITIALIZE, "amp.initialize")
            self._read_variables()
            last: cst.CSTNode = self.statement
            for another in calls[1:]:
                last = self._join(another, last)
            self._place(uses)
        with flow.about("options"):
            scale = None if first is None else parsed.source(first.value)
            self._options = options.read(parsed, call, self._given, bool(self._conditions), scale)
        self.static = self._options.static
        self.scales = "enabled=False" not in self._options.scaler
        with flow.about("names"):
            self._name(uses)
            self._write()

    def _refuse(self, node: cst.CSTNode, reason: str) -> NotUnderstood:
        return flow.refuse(self._parsed, node, reason)

    def _read_variables(self) -> None:
        parsed, call = self._parsed, self.call
        models, optimizers = self._given.pop("models", None), self._given.pop("optimizers", None)
        self.models = [v for m in _elements(models) if (v := variable(parsed, m)) is not None]
        self.optimizers = [v for o in _elements(optimizers) if (v := variable(parsed, o)) is not None]
        if not self.optimizers or len(self.optimizers) != len(_elements(optimizers)):
            raise self._refuse(call, "amp.initialize is not called with variables for its optimizers")
        if not self.models or len(self.models) != len(_elements(models)):
            raise self._refuse(call, "amp.initialize is not called with variables for its models")
        self.has_one_model = len(self.models) == 1
        self.names = " or ".join(o.text for o in self.optimizers)
        self._kept: list[str] = []
        assignment = parsed.parents[call]
        if models is not None and optimizers is not None:
            self._read_other_names(assignment, models, optimizers)
        names = [*(m.text for m in self.models), *(o.text for o in self.optimizers)]
        if not self._is_assigned_back(assignment, names) and not self._kept:
            raise self._refuse(call, f"amp.initialize is not assigned back to {', '.join(names)}")
        self.assignment = assignment
        self.statement = flow.simple_statement(parsed, assignment, "amp.initialize")

    @staticmethod
    def _is_assigned_back(assignment: cst.CSTNode, names: list[str]) -> bool:
        """Whether a statement assigns to these names, in this order, or to none."""
        if not isinstance(assignment, cst.Assign):
            return isinstance(assignment, cst.Expr)
        targets = (t.target for t in assignment.targets)
        return all([dotted(n) for e in _elements(t) for n in _elements(e)] == names for t in targets)

    def _join(self, call: cst.Call, before: cst.CSTNode) -> cst.CSTNode:
        """Takes over the models and optimizers of a call right after ``before``, with the same options: one scaler
        serves both. Returns its statement."""
        parsed = self._parsed
        given = bound(parsed, call, _INITIALIZE, "amp.initialize")
        models = [variable(parsed, m) for m in _elements(given.pop("models", None))]
        optimizers = [variable(parsed, o) for o in _elements(given.pop("optimizers", None))]
        found = [v for v in [*models, *optimizers] if v is not None]
        assignment = parsed.parents[call]
        statement = flow.simple_statement(parsed, assignment, "amp.initialize")
        (suite, index), (first, i) = parsed.blocks(statement)[0], parsed.blocks(before)[0]
        options = [{n: parsed.source(v) for n, v in g.items()} for g in (given, self._given)]
        if (
            suite is not first
            or index != i + 1
            or options[0] != options[1]
            or len(found) < len(models) + len(optimizers)
            or set(found) & {*self.models, *self.optimizers}
            or not self._is_assigned_back(assignment, [v.text for v in found])
        ):
            raise self._refuse(call, "a second call of amp.initialize with an optimizer")
        self.models += found[: len(models)]
        self.optimizers += found[len(models) :]
        self.has_one_model = False
        self.names = " or ".join(o.text for o in self.optimizers)
        self.dead.add(assignment)
        return statement

    def _read_other_names(self, assignment: cst.CSTNode, models: cst.CSTNode, optimizers: cst.CSTNode) -> None:
        """Reads ``models, [a, b] = amp.initialize([x, y], [net.a, net.b])``: a list of models, optimizers under other
        names. ``_kept``: the assignments that stay."""
        parsed = self._parsed
        target = assignment.targets[0].target if isinstance(assignment, cst.Assign) else None
        if not isinstance(target, cst.Tuple | cst.List) or len(target.elements) != 2:
            return
        to_models, to_optimizers = (e.value for e in target.elements)
        assert isinstance(assignment, cst.Assign)
        kept: list[tuple[cst.CSTNode, cst.CSTNode]] = []
        same_models = [dotted(e) for e in _elements(to_models)] == [m.text for m in self.models]
        if not same_models:
            if len(assignment.targets) > 1 or not isinstance(to_models, cst.Name) or not isinstance(models, cst.List):
                return
            kept.append((to_models, models))
        names = [dotted(e) for e in _elements(to_optimizers)]
        if names != [o.text for o in self.optimizers]:
            made = [v for e in _elements(to_optimizers) if (v := variable(parsed, e)) is not None]
            if (
                len(assignment.targets) > 1
                or len(made) != len(self.optimizers)
                or not all("." in o.text for o in self.optimizers)
            ):
                return
            self.optimizers = made
            self.names = " or ".join(o.text for o in made)
            kept.append((to_optimizers, optimizers))
        self._kept = [f"{parsed.source(a)} = {parsed.source(b)}" for a, b in kept]

    # --- where the scaler is made -------------------------------------------------------------------------------------

    def _place(self, uses: Collection[Use]) -> None:
        """Finds the statement before or after which the scaler is made, so that every use of it comes later."""
        parsed = self._parsed
        self._conditions: list[str] = []
        self._after = False
        here = [u for u in uses if function_of(parsed, u.root) is self.function]
        elsewhere = len(here) < len(uses)
        place: cst.CSTNode = self.statement
        suite, index = parsed.blocks(place)[0]
        while (found := guards.branch_condition(parsed, suite)) is not None:
            head, conditions = found
            covers = all(flow.contains(parsed, suite, u.root) for u in here)
            before = suite.body[:index]
            if (covers and here and not elsewhere) or any(self._makes(s) for s in before):
                break
            if not all(guards.is_pure(link.test) for link in guards.chain(head) if isinstance(link, cst.If)):
                raise self._refuse(head, "amp.initialize runs on a condition that calls a function")
            self._conditions = [*conditions, *self._conditions]
            if not self._after and not all(self._passes(s) for s in before):
                self._after = True
            if self._after and any(flow.contains(parsed, head, u.root) for u in here):
                raise self._refuse(
                    head, "the code before amp.initialize on this condition must run before the scaler is made"
                )
            place = head
            suite, index = parsed.blocks(place)[0]
        self.place, self.suite, self.index = place, suite, index

    def _makes(self, statement: cst.CSTNode) -> bool:
        """Whether a statement makes the model or the optimizer, which then exist below it only."""
        made = flow.stores(self._parsed, statement)
        return any(
            v.text in made and v.text not in flow.loads(self._parsed, statement)
            for v in [*self.models, *self.optimizers]
        )

    def _passes(self, statement: cst.CSTNode) -> bool:
        """Whether the scaler may be made before a statement instead of after it."""
        if self.dead.is_dead(statement):
            return True
        if isinstance(statement, cst.Try) and self.dead.flags(statement) is not None:
            return False
        moves = any(isinstance(n, cst.Attribute) and n.attr.value in _MOVES for n in flow.below(statement))
        return not moves and not flow.stores(self._parsed, statement)

    def follows(self, node: cst.CSTNode) -> bool:
        """Whether a node of the same function comes after the scaler is made: in the same block, or below it."""
        parsed = self._parsed
        for suite, index in parsed.blocks(node):
            if suite is self.suite:
                below = index == self.index and not self._after and self.place is not self.statement
                return index > self.index or below
            if self._is_repeated(suite):
                return True
            owner = parsed.parents.get(suite)
            if isinstance(owner, cst.Else | cst.ExceptHandler | cst.Finally):
                owner = parsed.parents[owner]
            if not isinstance(owner, cst.For | cst.While | cst.If | cst.With | cst.Try):
                return False
        return False

    def _is_repeated(self, suite: Block) -> bool:
        """Whether a suite is that of a later ``if`` on the condition under which the scaler is made."""
        parsed = self._parsed
        own, other = parsed.parents.get(self.suite), parsed.parents.get(suite)
        if not isinstance(own, cst.If) or not isinstance(other, cst.If):
            return False
        if (
            own.body is not self.suite
            or other.body is not suite
            or parsed.source(own.test) != parsed.source(other.test)
        ):
            return False
        (first, i), (second, j) = parsed.blocks(own)[0], parsed.blocks(other)[0]
        if first is not second or j <= i or first.body[i] is not own or first.body[j] is not other:
            return False
        between = first.body[i:j]
        changed = {n for s in between for n in flow.stores(parsed, s)}
        read = {n.value for n in flow.names(parsed, own.test)}
        chains = {dotted(n) for n in flow.below(own.test) if isinstance(n, cst.Attribute)}
        written = {
            dotted(n)
            for s in between
            for n in flow.below(s)
            if isinstance(n, cst.Attribute) and isinstance(parsed.parents[n], cst.AssignTarget | cst.AugAssign)
        }
        return guards.is_pure(own.test) and not read & changed and not chains & written

    # --- models and optimizers ----------------------------------------------------------------------------------------

    def models_of(self, optimizers: Collection[Variable]) -> list[Variable]:
        """The models whose parameters optimizers step: those that the code that makes them mentions, else all."""
        if len(self.optimizers) == 1:
            return self.models
        found: list[Variable] = []
        for optimizer in optimizers:
            made = [c for n in self._parsed.nodes if (c := self._maker(n, optimizer)) is not None]
            used = [m for m in self.models if any(m.same(self._parsed, n) for c in made for n in flow.below(c))]
            if not used or not all(c.args and self._mentions_models_only(c.args[0].value) for c in made):
                return self.models
            found += used
        return [m for m in self.models if m in found]

    def _maker(self, node: cst.CSTNode, optimizer: Variable) -> cst.Call | None:
        """The call that an assignment makes an optimizer with."""
        if not isinstance(node, cst.Assign) or [dotted(t.target) for t in node.targets] != [optimizer.text]:
            return None
        return node.value if isinstance(node.value, cst.Call) and node.value is not self.call else None

    def _mentions_models_only(self, node: cst.CSTNode) -> bool:
        """Whether an expression reads no variables but the models and its own."""
        parsed = self._parsed
        if any(m.same(parsed, node) for m in self.models):
            return True
        if isinstance(node, cst.Name) and parsed.scopes.get(node) is not None:
            assignments = parsed.assignments(node)
            known = all(isinstance(a, meta.ImportAssignment) or self._is_own(a) for a in assignments)
            return known and (bool(assignments) or hasattr(builtins, node.value))
        return all(self._mentions_models_only(child) for child in node.children)

    @staticmethod
    def _is_own(assignment: meta.BaseAssignment) -> bool:
        """Whether an assignment is that of a comprehension or a lambda."""
        scope = assignment.scope
        return isinstance(scope, meta.ComprehensionScope) or (
            isinstance(scope, meta.FunctionScope) and scope.name is None
        )

    def names_of(self, models: Collection[Variable]) -> set[str]:
        """The names of models and of their wrappers."""
        found = {m.text for m in models}
        for node in self._parsed.nodes:
            call = node.value if isinstance(node, cst.Assign) else None
            wraps = isinstance(call, cst.Call) and re.search(r"DataParallel|DDP|FSDP", dotted(call.func))
            if isinstance(node, cst.Assign) and isinstance(call, cst.Call) and wraps:
                found |= {dotted(t.target) for t in node.targets if any(dotted(a.value) in found for a in call.args)}
        return found

    # --- what takes its place -----------------------------------------------------------------------------------------

    def _name(self, uses: Collection[Use]) -> None:
        parsed = self._parsed
        outside = [u.root for u in uses if not self.is_local(u.root)]
        prefix, owner = "", self.optimizers[0].owner
        self._global = False
        if outside and owner is not None and all(related(class_of(parsed, n), owner) for n in outside):
            prefix = "self."
        elif outside:
            self._global = not isinstance(self.function, cst.Module)
        self.scaler = prefix + self._fresh("scaler", "grad_scaler", "amp_grad_scaler")
        self.device = prefix + self._fresh("device_type", "amp_device_type", "autocast_device_type")

    def is_local(self, node: cst.CSTNode) -> bool:
        """Whether the locals of amp.initialize's function are visible at a node."""
        return self.function in (function_of(self._parsed, node), *self._parsed.ancestors(node))

    def _fresh(self, *wanted: str) -> str:
        """The first of these names that the file does not use."""
        for name in wanted:
            if not re.search(rf"\b{name}\b", self._parsed.text):
                return name
        raise NotUnderstood(f"the names {', '.join(wanted)} are all taken")

    def _write(self) -> None:
        parsed, given = self._parsed, self._options
        level = given.level
        conditions = [*self._conditions, *given.enabled]
        lines = [f"global {self.device}, {self.scaler}"] if self._global else []
        lines.append(f"{self.device} = next({self.models[0].text}.parameters()).device.type")
        if level is not None:
            unit = "\t" if "\t" in indent_of(parsed, self.place) else parsed.tree.default_indent
            refused = guards.both([*conditions, f'{_atom(level)} not in ("O0", "O1")'])
            lines.append(f"if {refused}:")
            lines.append(f'{unit}raise ValueError("torch.amp has no opt_level %s" % ({level},))')
            conditions.append(f'{_atom(level)} == "O1"')
        if given.scale is not None:
            options = self._fresh("scale_options")
            scale = f'{{"init_scale": float({given.scale}), "growth_interval": 2**31 - 1}}'
            lines.append(f'{options} = {{}} if {_atom(given.scale)} in (None, "dynamic") else {scale}')
        enabled = [f"enabled={guards.as_bool(conditions)}"] if conditions else []
        lines.append(f"{self.scaler} = torch.amp.GradScaler({', '.join([self.device, *given.scaler, *enabled])})")
        on = [f"enabled={self.scaler}.is_enabled()"] if conditions else []
        self.autocast = f"torch.autocast({', '.join([self.device, 'dtype=torch.float16', *given.autocast, *on])})"
        indent, newline = indent_of(parsed, self.place), parsed.tree.default_newline
        if self.place is self.statement:
            self.edits = [Edit(*parsed.span(self.assignment), (newline + indent).join([*lines, *self._kept]))]
            return
        if not self._kept:
            self.dead.add(self.assignment)
        kept = (newline + indent_of(parsed, self.assignment)).join(self._kept)
        self.edits = [Edit(*parsed.span(self.assignment), kept)] if self._kept else []
        text = "".join(f"{indent}{line}{newline}" for line in lines)
        at = parsed.line_start(parsed.span(self.place)[0])
        if self._after:
            end = parsed.span(self.place)[1]
            at = next((start for start in parsed.starts if start >= end), len(parsed.text))
            text = text if at in parsed.starts else newline + text
        self.edits.append(Edit(at, at, text))


def _atom(source: str) -> str:
    return source if re.fullmatch(r"[\w.\[\]'\"]+", source) else f"({source})"


def _elements(node: cst.CSTNode | None) -> list[cst.CSTNode]:
    if isinstance(node, cst.List | cst.Tuple):
        return [e.value for e in node.elements]
    return [node] if node is not None else []
