"""One optimizer step of an O1 training loop and the backwards before it: the conditions for rewriting them to
torch.amp, and the edits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import libcst as cst

from ampctx_apex.migrate import flow, forward, gradients, guards, paths
from ampctx_apex.migrate.analysis import Parsed, dotted
from ampctx_apex.migrate.backward import Backward, statement_of
from ampctx_apex.migrate.flow import NotUnderstood
from ampctx_apex.migrate.imports import indent_of
from ampctx_apex.migrate.report import Edit
from ampctx_apex.migrate.session import Session
from ampctx_apex.migrate.variables import Variable, function_of, parameters


def read(parsed: Parsed, session: Session, backwards: list[Backward]) -> list[Loop]:
    """The loops of a file: the backwards, by the steps that use their gradients.

    Raises:
        NotUnderstood: a loop cannot be rewritten; with the line and the reason.
    """
    groups: dict[tuple[int, ...], tuple[list[cst.Attribute], list[Backward]]] = {}
    with flow.about("step"):
        for backward in backwards:
            steps = [_step(parsed, backward, i) for i in range(len(backward.optimizers))]
            steps.sort(key=parsed.span)
            groups.setdefault(tuple(map(id, steps)), (steps, []))[1].append(backward)
        seen: set[int] = set()
        for key, (steps, _) in groups.items():
            if seen & set(key):
                raise flow.refuse(parsed, steps[0], "one step follows backwards for different optimizers")
            seen |= set(key)
    loops = [Loop(parsed, session, *group) for group in groups.values()]
    with flow.about("scale"):
        for loop in loops:
            for other in loops:
                loop.check_scale(other)
    for loop in loops:
        loop.read(loops)
    for run in forward.merged(parsed, [run for loop in loops for run in loop.runs]):
        loops[0].edits += forward.wrapped(parsed, run, f"with {session.autocast}:")
    return loops


def _step(parsed: Parsed, backward: Backward, index: int) -> cst.Attribute:
    """The only ``step`` of an optimizer that may follow a backward."""
    steps = [s for s in backward.steps(index) if not paths.exclusive(parsed, s, backward.block)]
    text = backward.optimizers[index].text
    if len(steps) != 1:
        at = steps[1] if steps else backward.block
        raise flow.refuse(parsed, at, f"found {len(steps)} calls of {text}.step(), expected one")
    return steps[0]


class Loop:
    """A step and the ``backwards`` before it; steps, if a backward is for several optimizers. ``runs``: what goes into
    ``autocast``. ``edits``: the others. ``steps``: the uses of the optimizers' ``step``.

    Raises:
        NotUnderstood: the loop cannot be rewritten; with the line and the reason.
    """

    def __init__(self, parsed: Parsed, session: Session, steps: list[cst.Attribute], backwards: list[Backward]) -> None:
        self._parsed, self._session = parsed, session
        self.steps, self.backwards = steps, sorted(backwards, key=lambda b: parsed.span(b.block))
        self.optimizers = list(dict.fromkeys(o for b in backwards for o in b.optimizers))
        self.edits: list[Edit] = []
        self.runs: list[forward.Run] = []
        self._updates = True
        self._text = " and ".join(o.text for o in self.optimizers)
        with flow.about("step"):
            self._read_step()

    def _refuse(self, node: cst.CSTNode, reason: str) -> NotUnderstood:
        return flow.refuse(self._parsed, node, reason)

    def read(self, loops: Sequence[Loop]) -> None:
        """Makes the edits. ``loops``: all loops of the file."""
        self._others = [b for loop in loops for b in loop.backwards]
        self._write_steps()
        for backward in self.backwards:
            self.edits += backward.edits
        with flow.about("forward"):
            self._read_forward()
        with flow.about("gradients"):
            self._read_gradients(loops)
        with flow.about("zeroed-gradients"):
            self._check_zeroed()

    # --- step ---------------------------------------------------------------------------------------------------------

    def _read_step(self) -> None:
        parsed = self._parsed
        self._expressions: list[cst.Expr] = []
        for attribute in self.steps:
            step = parsed.parents[attribute]
            expression = parsed.parents[step]
            if (
                not isinstance(step, cst.Call)
                or step.func is not attribute
                or step.args
                or not isinstance(expression, cst.Expr)
            ):
                raise self._refuse(step, f"{self._text}.step takes a closure, or its result is used")
            self._expressions.append(expression)
        lines = [flow.simple_statement(parsed, e, f"{self._text}.step()") for e in self._expressions]
        places = [parsed.blocks(line)[0] for line in lines]
        if any(b[0] is not a[0] or b[1] != a[1] + 1 for a, b in itertools.pairwise(places)):
            raise self._refuse(lines[1], f"the steps of {self._text} do not follow each other")
        self._step = lines[0]
        self.function = function_of(parsed, self._step)
        self._at = [self._in_function(b) for b in self.backwards]
        self._read_order()

    def _in_function(self, backward: Backward) -> cst.CSTNode:
        """The statement of the step's function that runs the backward."""
        parsed = self._parsed
        at: cst.CSTNode = backward.anchor
        for _ in range(3):
            function = function_of(parsed, at)
            if function is self.function:
                return at
            if not isinstance(function, cst.FunctionDef):
                break
            at = statement_of(
                parsed, backward.site(function, self._step, f"{self._text}.step() is in another function")
            )
        raise self._refuse(self._step, f"another function uses {self._text} and may be its closure")

    def _read_order(self) -> None:
        """Finds the block that holds the backwards, and at its top or in an ``if`` the step.

        ``_begin``, ``_end``: the indices of the first and last backward there, ``_owner``: of the step.
        """
        parsed, step = self._parsed, self._step
        (suite, index), *outer = parsed.blocks(step)
        self._step_suite, self._step_index = suite, index
        holding = [{id(s): i for s, i in parsed.blocks(at)} for at in self._at]
        owner = parsed.parents.get(suite)
        self.conditional = any(id(suite) not in h for h in holding)
        if self.conditional:
            if (
                not isinstance(owner, cst.If)
                or not outer
                or owner.body is not suite
                or any(id(outer[0][0]) not in h or id(suite) in h for h in holding)
                or parsed.parents[owner] is not outer[0][0]
            ):
                raise self._refuse(
                    step, f"{self._text}.step() is neither in the block that holds amp.scale_loss nor in an if there"
                )
            if not guards.is_pure(owner.test):
                raise self._refuse(owner, f"the condition around {self._text}.step() calls a function")
            suite, index = outer[0]
        self._common, self._owner_index = suite, index
        self._begin, self._end = (f(h[id(suite)] for h in holding) for f in (min, max))
        if index <= self._end:
            raise self._refuse(step, f"{self._text}.step() comes before amp.scale_loss")
        for at in self._at:
            for around, _ in parsed.blocks(at):
                if around is suite:
                    break
                inner = parsed.parents.get(around)
                if isinstance(inner, cst.While | cst.For) and inner.orelse is not None:
                    raise self._refuse(inner, "the loop around amp.scale_loss has an else")

    def check_scale(self, other: Loop) -> None:
        """Sees to it that ``other`` does not change the scale while gradients of this loop are scaled by it.

        ``scaler.update`` follows the last of steps whose gradients exist at the same time.
        """
        parsed = self._parsed
        if other is self or paths.exclusive(parsed, self._step, other._step):
            return
        if self.conditional:
            reason = f"this step would change the scale while gradients of {self._text} add up under it"
            raise self._refuse(other._step, reason)
        sites = gradients.sites(parsed, other._step, self.function)
        segment = self._common.body[self._begin : self._owner_index + 1]
        inside = [s for s in sites if any(flow.contains(parsed, statement, s) for statement in segment)]
        if inside:
            if other.function is not self.function:
                raise self._refuse(
                    inside[0], f"{other._text} steps here, while the gradients of {self._text} are scaled"
                )
            # The scaler refuses a second step of an optimizer without an update between them.
            index = next(i for i, s in enumerate(self._common.body) if flow.contains(parsed, s, other._step))
            paths.check_reached(parsed, self._common.body[index : self._owner_index], self._step)
            other._updates = False

    def _write_steps(self) -> None:
        scaler, parsed = self._session.scaler, self._parsed
        for expression in self._expressions:
            assert isinstance(expression.value, cst.Call)
            assert isinstance(expression.value.func, cst.Attribute)
            lines = [f"{scaler}.step({parsed.source(expression.value.func.value)})"]
            if self._updates and expression is self._expressions[-1]:
                lines.append(f"{scaler}.update()")
            newline = parsed.tree.default_newline + indent_of(parsed, expression)
            self.edits.append(Edit(*parsed.span(expression), newline.join(lines)))

    # --- forward ------------------------------------------------------------------------------------------------------

    def _models(self) -> set[str]:
        """The names of the models that the optimizers may step."""
        return self._session.names_of(self._session.models_of(self.optimizers))

    def _candidates(self, backward: Backward) -> set[str]:
        """Parameters that may be the model, in a function that does not call amp.initialize."""
        function = function_of(self._parsed, backward.forward_at)
        if function is self._session.function:
            return set()
        return {p for p in parameters(function) if not forward.LOSSES.search(p) and p != "self"}

    def _read_forward(self) -> None:
        session, parsed = self._session, self._parsed
        self._known: set[str] = set()
        self._called: set[str] = set()
        self._leading: list[cst.CSTNode] = []
        apart = [p for b in self._others for p in b.parts]
        known = [s for b in self._others for s in b.forward(apart).statements]
        known += [*apart, *(b.anchor for b in self._others if not b.hoisted)]
        models = session.names_of(session.models)
        for backward in self.backwards:
            found = backward.forward(apart)
            self._known |= {n for s in found.leading for n in flow.stores(parsed, s)} | found.names
            self._leading += found.leading
            candidates = self._candidates(backward)
            if not found.made or not found.calls_model(models | candidates):
                model = session.models[0].text
                raise self._refuse(
                    backward.forward_loss, f"found no call of {model}(...) in this block that leads to the loss"
                )
            self._called |= {n for n in candidates if found.calls_directly(n)}
            self.runs += [*found.runs, *found.late(known)]

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _read_gradients(self, loops: Sequence[Loop]) -> None:
        """Gradients are now scaled between backward and step: inserts ``unscale_`` before the first reader."""
        parsed, suite, session = self._parsed, self._common, self._session
        anchor, owner = suite.body[self._begin], suite.body[self._owner_index]
        reading: list[cst.CSTNode] = list(suite.body[self._end + 1 : self._owner_index])
        held: list[cst.CSTNode] = list(suite.body[self._begin : self._end + 1])
        adding_up: list[cst.CSTNode] = []
        last = self.backwards[-1]
        if self.conditional:
            held += reading
            reading = list(self._step_suite.body[: self._step_index])
            adding_up = list(suite.body[self._owner_index + 1 :])
            held += [owner.orelse] if isinstance(owner, cst.If) and owner.orelse is not None else []
        elif last.hoisted and suite.body[self._end] is last.anchor:
            reading, held = [last.anchor, *reading], held[:-1]
        after = self._step_suite.body[self._step_index + len(self.steps) :]
        unscaled: cst.CSTNode | None = None
        calls = [c for s in reading for c in gradients.unknown_calls(parsed, s, ())]
        calls += [c for s in held for c in gradients.unknown_calls(parsed, s, self._known | self._counters())]
        certain = list(gradients.certain(parsed, self.function))
        mine = {*self._models(), *self._called, *(o.text for o in self.optimizers)}
        for node in [*certain, *gradients.receivers(parsed, self.function, mine), *calls]:
            if not self._is_later(node, anchor) or self._is_apart(node, loops):
                continue
            sure = any(node is c for c in certain)
            statement = next((s for s in reading if flow.contains(parsed, s, node)), None)
            if statement is not None:
                if forward.is_zero_grad(parsed, node):
                    raise self._refuse(node, "gradients are zeroed between backward and step")
                if unscaled is None or parsed.span(statement) < parsed.span(unscaled):
                    unscaled = statement
            elif any(flow.contains(parsed, s, node) for s in held):
                if forward.is_zero_grad(parsed, node):
                    raise self._refuse(node, "gradients are zeroed between backward and step")
                self._read_scaled(node)
            elif sure:
                raise self._refuse(node, "gradients are read, or may be, where they are now scaled")
            elif forward.is_zero_grad(parsed, node):
                continue
            elif any(flow.contains(parsed, s, node) for s in adding_up):
                raise self._refuse(node, "gradients may be read before the step, where they are now scaled")
            elif any(flow.contains(parsed, s, node) for s in after):
                # Code after the step may read gradients, which a fused optimizer leaves scaled.
                unscaled = unscaled or self._step
        if unscaled is not None:
            first = next((i for i, s in enumerate(self._step_suite.body) if s is unscaled), self._step_index)
            paths.check_reached(parsed, self._step_suite.body[first : self._step_index], self._step)
            start = parsed.span(unscaled)[0]
            newline = parsed.tree.default_newline + indent_of(parsed, unscaled)
            text = "".join(f"{session.scaler}.unscale_({o.text}){newline}" for o in self.optimizers)
            # A backward that is put before the same statement comes first.
            self.edits.insert(len(self.edits) if unscaled is last.anchor else 0, Edit(start, start, text))

    def _is_later(self, node: cst.CSTNode, anchor: cst.CSTNode) -> bool:
        """Whether a node may run after the first backward, and is not part of a backward."""
        parsed, first, at = self._parsed, self.backwards[0], self._at[0]
        if any(flow.contains(parsed, p, node) for b in self.backwards for p in b.parts):
            return False
        if not flow.contains(parsed, anchor, node) or (anchor is not at and at is not first.anchor):
            return True
        repeated = any(
            isinstance(a, cst.For | cst.While) and flow.contains(parsed, anchor, a) for a in parsed.ancestors(at)
        )
        return repeated or parsed.span(node) > parsed.span(first.block)

    def _is_apart(self, node: cst.CSTNode, loops: Sequence[Loop]) -> bool:
        """Whether a node does not read this loop's gradients: it is on the other branch of an ``if``, in a forward, or
        part of the loop of other optimizers."""
        parsed, session = self._parsed, self._session
        if paths.exclusive(parsed, node, self._step):
            return True
        if len(self.backwards) > 1 and any(flow.contains(parsed, s, node) for s in self._leading):
            return True
        others = [loop for loop in loops if loop is not self]
        theirs = [*(p for loop in others for b in loop.backwards for p in b.parts), *(o._step for o in others)]
        if any(flow.contains(parsed, t, node) for t in theirs):
            return True
        if any(flow.contains(parsed, s, node) for loop in others for s in loop._leading_statements()):
            return True
        # What concerns the models and the optimizers of other steps only.
        mine = {*self._models(), *self._called, *(o.text for o in self.optimizers)}
        foreign = {o.text for loop in others for o in loop.optimizers} | session.names_of(session.models)
        call = next((n for n in [node, *parsed.ancestors(node)] if isinstance(n, cst.Call | cst.BaseStatement)), node)
        while isinstance(call, cst.Call) and not isinstance(parsed.parents[call], cst.Expr | cst.Assign):
            above = next(n for n in parsed.ancestors(call) if isinstance(n, cst.Call | cst.BaseStatement))
            if not isinstance(above, cst.Call):
                break
            call = above
        named = {dotted(n) for n in flow.below(call) if isinstance(n, cst.Name | cst.Attribute)}
        return isinstance(call, cst.Call) and bool(named & foreign) and not named & mine

    def _leading_statements(self) -> Iterator[cst.CSTNode]:
        for backward in self.backwards:
            yield from backward.forward().leading

    def _counters(self) -> set[str]:
        """The variables of the loops around the backward."""
        loops = (a for at in self._at for a in self._parsed.ancestors(at) if isinstance(a, cst.For))
        return {n.value for loop in loops for n in flow.names(self._parsed, loop.target)}

    def _read_scaled(self, node: cst.CSTNode) -> None:
        """Clips scaled gradients by a bound that is scaled, too, and divides a norm of theirs by the scale."""
        parsed, scale = self._parsed, f"{self._session.scaler}.get_scale()"
        found = gradients.clip(parsed, node)
        if found is None:
            raise self._refuse(node, "gradients are read, or may be, where they are now scaled")
        call, bound = found
        edits = []
        if bound is not None:
            source = parsed.source(bound)
            simple = isinstance(bound, cst.Name | cst.Attribute | cst.Float | cst.Integer | cst.Subscript | cst.Call)
            edits.append(Edit(*parsed.span(bound), f"{source if simple else f'({source})'} * {scale}"))
        parent = parsed.parents[call]
        if not isinstance(parent, cst.Expr):
            start, end = parsed.span(call)
            whole = isinstance(parent, cst.Assign | cst.AugAssign | cst.AnnAssign)
            edits += [] if whole else [Edit(start, start, "(")]
            edits.append(Edit(end, end, f" / {scale}" if whole else f" / {scale})"))
        self.edits += [e for e in edits if e not in self.edits]

    def _check_zeroed(self) -> None:
        """Unscaled gradients of one step must not add to scaled ones of the next."""
        parsed, session = self._parsed, self._session
        before = self._common.body[self._begin]
        for optimizer in self.optimizers:
            models = session.models_of([optimizer])
            known = [session.names_of([m]) | (self._called if session.has_one_model else set()) for m in models]

            def is_zeroed(names: set[str], optimizer: Variable = optimizer) -> bool:
                return paths.is_zeroed(
                    parsed, before, self._step, lambda n: optimizer.same(parsed, n) or dotted(n) in names
                )

            if session.scales and not is_zeroed(set()) and not all(is_zeroed(names) for names in known):
                raise self._refuse(
                    self._step,
                    f"found no unconditional {optimizer.text}.zero_grad() between this step and the next backward: "
                    "unscaled gradients would add to scaled ones",
                )
