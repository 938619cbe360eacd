"""One O1 training loop, around one ``amp.scale_loss``: the conditions for rewriting it to torch.amp, and the edits."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from ampctx.migrate import flow, forward, gradients, guards, paths
from ampctx.migrate.analysis import Parsed, Use, dotted
from ampctx.migrate.flow import NotUnderstood
from ampctx.migrate.imports import indent_of
from ampctx.migrate.report import Edit
from ampctx.migrate.session import Session, bound
from ampctx.migrate.variables import Variable, argument, call_sites, function_of, parameters, variable

_SCALE_LOSS = ["loss", "optimizers", "loss_id", "model", "delay_unscale"]
_SIMPLE = (cst.Name, cst.Attribute, cst.Subscript, cst.Call)


class Loop:
    """A loop and its ``edits``. ``backwards``: the calls of ``backward`` that are part of it.

    Raises:
        NotUnderstood: the loop cannot be rewritten; with the line and the reason.
    """

    def __init__(self, parsed: Parsed, session: Session, use: Use) -> None:
        assert use.call is not None
        self._parsed, self._session, self._call = parsed, session, use.call
        self.edits: list[Edit] = []
        self.backwards: list[cst.CSTNode] = []
        with flow.about("backward"):
            self._read_block()
            self._read_guard()
        with flow.about("forward"):
            self._read_sites()
        with flow.about("step"):
            self._read_step()
        self._write_backward()
        with flow.about("forward"):
            self._read_forward()
        with flow.about("gradients"):
            self._read_gradients()
        with flow.about("zeroed-gradients"):
            self._check_zeroed()

    def _refuse(self, node: cst.CSTNode, reason: str) -> NotUnderstood:
        return flow.refuse(self._parsed, node, reason)

    def _replace(self, node: cst.CSTNode, lines: list[str]) -> None:
        newline = self._parsed.tree.default_newline + indent_of(self._parsed, node)
        self.edits.append(Edit(*self._parsed.span(node), newline.join(lines)))

    # --- backward -----------------------------------------------------------------------------------------------------

    def _read_block(self) -> None:
        call, parsed, session = self._call, self._parsed, self._session
        item = parsed.parents[call]
        block = parsed.parents[item]
        if not isinstance(item, cst.WithItem) or not isinstance(block, cst.With) or len(block.items) != 1:
            raise self._refuse(call, "amp.scale_loss is not the only context of a with statement")
        given = bound(parsed, call, _SCALE_LOSS, "amp.scale_loss")
        loss, optimizer = given.pop("loss", None), given.pop("optimizers", None)
        if isinstance(optimizer, cst.List) and len(optimizer.elements) == 1:
            optimizer = optimizer.elements[0].value
        self.function = function_of(parsed, block)
        own = variable(parsed, optimizer)
        same = optimizer is not None and session.optimizer.same(parsed, optimizer)
        given_here = own is not None and (own.owner is not None or own.text in parameters(self.function))
        if own is None or not (same or given_here or not session.is_local(block)):
            raise self._refuse(call, f"amp.scale_loss is not called for {session.optimizer.text} alone")
        self.optimizer: Variable = own
        for name, value in given.items():
            source = parsed.source(value)
            delayed = name in ("delay_unscale", "delay_overflow_check") and source != "True" and guards.is_pure(value)
            if name != "model" and not delayed and not (name == "loss_id" and source == "0"):
                raise self._refuse(call, f"{name}={source}")
        if loss is None or not _is_loss(loss):
            raise self._refuse(call, "the loss is neither a variable nor simple arithmetic")
        self._check_body(block, item)
        self._block, self._loss = block, loss
        if self.function is session.function and not session.follows(block):
            raise self._refuse(call, "amp.scale_loss does not follow amp.initialize in the same block or a loop in it")
        self._suite = parsed.blocks(block)[0][0]
        if not isinstance(self._suite, cst.IndentedBlock | cst.Module):
            raise self._refuse(call, "the block is on one line")

    def _check_body(self, block: cst.With, item: cst.WithItem) -> None:
        name = item.asname.name if item.asname is not None else None
        body = [
            s for line in block.body.body for s in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])
        ]
        backward = body[0].value if len(body) == 1 and isinstance(body[0], cst.Expr) else None
        if (
            not isinstance(name, cst.Name)
            or not isinstance(backward, cst.Call)
            or dotted(backward.func) != f"{name.value}.backward"
        ):
            raise self._refuse(block, "the block of amp.scale_loss holds more than scaled_loss.backward()")
        for node in flow.names(self._parsed, self.function):
            if node.value == name.value and not any(_binds(a, name.value) for a in self._parsed.ancestors(node)):
                raise self._refuse(block, f"{name.value} is used outside of the block")
        self._arguments = self._parsed.arguments(backward) or ()
        self.backwards.append(backward.func)

    def _read_guard(self) -> None:
        """Finds ``if fp16: with amp.scale_loss ... else: loss.backward()``.

        ``_anchor``: the outermost statement that the backward is all of.
        """
        parsed = self._parsed
        self._anchor: cst.CSTNode = self._block
        self._plain: list[cst.Expr] = []
        self._head: cst.If | None = None
        found = guards.branch_condition(parsed, self._suite)
        if found is None:
            return
        head, _ = found
        others = [
            c
            for c in flow.calls(head)
            if isinstance(c.func, cst.Attribute) and c.func.attr.value == "backward"
            if not flow.contains(parsed, self._block, c)
        ]
        if not others:
            return
        for call in others:
            assert isinstance(call.func, cst.Attribute)
            statement = parsed.parents[call]
            if not isinstance(statement, cst.Expr) or _bare(parsed, call.func.value) != _bare(parsed, self._loss):
                raise self._refuse(call, "a second backward")
            line = flow.simple_statement(parsed, statement, "backward")
            in_branch = guards.branch_condition(parsed, parsed.blocks(line)[0][0])
            if in_branch is None or in_branch[0] is not head:
                raise self._refuse(call, "a second backward")
            self._plain.append(statement)
            self.backwards.append(call.func)
        for link in guards.chain(head):
            if isinstance(link, cst.If) and not guards.is_pure(link.test):
                raise self._refuse(link, "the condition around amp.scale_loss calls a function")
        branches = list(guards.chain(head))
        if len(branches) != len(self._plain) + 1 or not isinstance(branches[-1], cst.Else):
            raise self._refuse(head, "a branch beside amp.scale_loss has no backward")
        self._anchor = self._head = head

    def _scaled(self, loss: cst.BaseExpression, arguments: tuple[str, ...]) -> str:
        source = self._parsed.source(loss)
        source = source if isinstance(loss, _SIMPLE) else f"({source})"
        return f"{self._session.scaler}.scale({source}.float()).backward({', '.join(arguments)})"

    def _write_backward(self) -> None:
        parsed = self._parsed
        source = parsed.source(self._block)
        comments = [c.rstrip() for c in re.findall(r"#.*", source)] if "#" in source else []
        line = self._scaled(self._loss, self._arguments)
        self._hoisted = False
        if self._head is None:
            self._replace(self._block, [*comments, line])
            return
        bodies: list[Sequence[cst.CSTNode]] = [
            [s for s in link.body.body if not self._session.dead.is_dead(s)] for link in guards.chain(self._head)
        ]
        backwards = [self._block, *(parsed.parents[p] for p in self._plain)]
        if all(any(body[0] is b for b in backwards) for body in bodies) and not any(
            isinstance(p.value, cst.Call) and p.value.args for p in self._plain if self._arguments == ()
        ):
            longer = [len(body) > 1 for body in bodies]
            if not any(longer):
                self._replace(self._head, [*comments, line])
                return
            if all(longer) or (longer[0] and longer[:-1] == [True] * (len(longer) - 1)):
                self._hoist(comments, line, bodies, longer)
                return
        self._replace(self._block, [*comments, line])
        for plain in self._plain:
            assert isinstance(plain.value, cst.Call)
            assert isinstance(plain.value.func, cst.Attribute)
            self._replace(plain, [self._scaled(plain.value.func.value, parsed.arguments(plain.value) or ())])

    def _hoist(self, comments: list[str], line: str, bodies: list[Sequence[cst.CSTNode]], longer: list[bool]) -> None:
        """Puts the backward before the ``if`` whose branches all begin with it. What follows stays in the branches."""
        parsed, head = self._parsed, self._head
        assert head is not None
        self._hoisted = True
        start, newline = parsed.span(head)[0], parsed.tree.default_newline + indent_of(parsed, head)
        self.edits.append(Edit(start, start, newline.join([*comments, line, ""])))
        for body, more in zip(bodies, longer, strict=True):
            if more:
                first = parsed.line_start(parsed.span(body[0])[0])
                self.edits.append(Edit(first, parsed.line_start(parsed.span(body[1])[0]), ""))
            else:
                # The else that held nothing more.
                end = parsed.span(bodies[-2][-1])[1]
                self.edits.append(Edit(end, parsed.span(head)[1], ""))

    # --- places -------------------------------------------------------------------------------------------------------

    def _read_sites(self) -> None:
        """If the loss is a parameter, the forward is where this function is called."""
        parsed = self._parsed
        self._forward_at: cst.CSTNode = self._anchor
        self._forward_loss: cst.BaseExpression = self._loss
        given = {n.value for n in flow.names(parsed, self._loss)} & set(parameters(self.function))
        if not given - {"self"} or self._forward().made:
            return
        name = next(iter(given - {"self"}))
        site = self._site(self.function, self._loss, f"{name} comes from the caller")
        loss = argument(site, self.function, name)
        if loss is None:
            raise self._refuse(site, f"found no argument for {name}")
        self._forward_at, self._forward_loss = _statement(parsed, site), loss

    def _forward(self) -> forward.Forward:
        return forward.Forward(self._parsed, self._forward_at, self._forward_loss, self.optimizer, self._session.place)

    def _site(self, function: cst.CSTNode, node: cst.CSTNode, reason: str) -> cst.Call:
        """The only call of a function."""
        sites = list(call_sites(self._parsed, function))
        if len(sites) != 1:
            raise self._refuse(node, f"{reason}, and this file has {len(sites)} calls of the function, not one")
        return sites[0]

    def _steps(self) -> Sequence[cst.CSTNode]:
        """The uses of ``step`` of the optimizer that belong to this loop: here, or of the caller's variable."""
        parsed, found = self._parsed, []
        for node in self.optimizer.nodes(parsed):
            parent = parsed.parents[node]
            if isinstance(parent, cst.Attribute) and parent.value is node and parent.attr.value == "step":
                found.append(parent)
        own = [s for s in found if function_of(parsed, s) is self.function]
        if found or self.optimizer.text not in parameters(self.function):
            return own if self.optimizer.owner is not None and own else found
        given = [argument(s, self.function, self.optimizer.text) for s in call_sites(parsed, self.function)]
        there = variable(parsed, given[0]) if len(given) == 1 else None
        if there is None or there.same(parsed, self._call.args[1].value):
            return []
        self.optimizer = there
        return self._steps()

    def _read_step(self) -> None:
        parsed = self._parsed
        steps = self._steps()
        text = self.optimizer.text
        if len(steps) != 1:
            raise self._refuse(
                steps[1] if steps else self._block, f"found {len(steps)} calls of {text}.step(), expected one"
            )
        step = parsed.parents[steps[0]]
        expression = parsed.parents[step]
        if (
            not isinstance(step, cst.Call)
            or step.func is not steps[0]
            or step.args
            or not isinstance(expression, cst.Expr)
        ):
            raise self._refuse(step, f"{text}.step takes a closure, or its result is used")
        self._step = flow.simple_statement(parsed, expression, f"{text}.step()")
        self._at = self._in_function(step)
        self._read_order(step)
        scaler = self._session.scaler
        self._replace(expression, [f"{scaler}.step({text})", f"{scaler}.update()"])

    def _in_function(self, step: cst.CSTNode) -> cst.CSTNode:
        """The statement of the step's function that runs the backward."""
        parsed = self._parsed
        at: cst.CSTNode = self._anchor
        for _ in range(3):
            function = function_of(parsed, at)
            if function is function_of(parsed, step):
                return at
            if not isinstance(function, cst.FunctionDef):
                break
            at = _statement(parsed, self._site(function, step, f"{self.optimizer.text}.step() is in another function"))
        raise self._refuse(step, f"another function uses {self.optimizer.text} and may be its closure")

    def _read_order(self, step: cst.CSTNode) -> None:
        """Finds the block that holds the backward, and at its top or in an ``if`` the step. ``_common``: its index."""
        parsed, text = self._parsed, self.optimizer.text
        (suite, index), *outer = parsed.blocks(self._step)
        self._step_suite, self._step_index = suite, index
        holding = {id(s): i for s, i in parsed.blocks(self._at)}
        self.conditional = id(suite) not in holding
        owner = parsed.parents.get(suite)
        if self.conditional:
            if not isinstance(owner, cst.If) or not outer or id(outer[0][0]) not in holding or owner.body is not suite:
                raise self._refuse(
                    step, f"{text}.step() is neither in the block that holds amp.scale_loss nor in an if there"
                )
            if parsed.parents[owner] is not outer[0][0]:
                raise self._refuse(
                    step, f"{text}.step() is neither in the block that holds amp.scale_loss nor in an if there"
                )
            if not guards.is_pure(owner.test):
                raise self._refuse(owner, f"the condition around {text}.step() calls a function")
            suite, index = outer[0]
        self._common, self._begin, self._owner_index = suite, holding[id(suite)], index
        if index <= self._begin:
            raise self._refuse(step, f"{text}.step() comes before amp.scale_loss")
        for around, _ in parsed.blocks(self._at):
            if around is suite:
                break
            inner = parsed.parents.get(around)
            if isinstance(inner, cst.While | cst.For) and inner.orelse is not None:
                raise self._refuse(inner, "the loop around amp.scale_loss has an else")

    # --- forward ------------------------------------------------------------------------------------------------------

    def _models(self) -> set[str]:
        """The model's names: in amp.initialize, of its wrappers, and of parameters that the forward calls."""
        parsed = self._parsed
        found = {m.text for m in self._session.models}
        for node in parsed.nodes:
            call = node.value if isinstance(node, cst.Assign) else None
            wraps = isinstance(call, cst.Call) and re.search(r"DataParallel|DDP|FSDP", dotted(call.func))
            if isinstance(node, cst.Assign) and isinstance(call, cst.Call) and wraps:
                found |= {dotted(t.target) for t in node.targets if any(dotted(a.value) in found for a in call.args)}
        return found

    def _candidates(self) -> set[str]:
        """Parameters that may be the model, in a function that does not call amp.initialize."""
        function = function_of(self._parsed, self._forward_at)
        if function is self._session.function:
            return set()
        return {p for p in parameters(function) if not forward.LOSSES.search(p) and p != "self"}

    def _read_forward(self) -> None:
        session, found = self._session, self._forward()
        parsed = self._parsed
        self._known = {n for s in found.leading for n in flow.stores(parsed, s)} | found.names
        candidates = self._candidates()
        if not found.made or not found.calls_model(self._models() | candidates):
            model = session.models[0].text
            raise self._refuse(
                self._forward_loss, f"found no call of {model}(...) in this block that leads to the loss"
            )
        self._called = {n for n in candidates if found.calls_directly(n)}
        for run in [*found.runs, *found.late(self._anchor)]:
            self.edits += forward.wrapped(parsed, run, f"with {session.autocast}:")

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _read_gradients(self) -> None:
        """Gradients are now scaled between backward and step: inserts ``unscale_`` before the first reader."""
        parsed, suite, session = self._parsed, self._common, self._session
        function = function_of(parsed, self._step)
        anchor, owner = suite.body[self._begin], suite.body[self._owner_index]
        reading: list[cst.CSTNode] = list(suite.body[self._begin + 1 : self._owner_index])
        held: list[cst.CSTNode] = [anchor]
        adding_up: list[cst.CSTNode] = []
        if self.conditional:
            held += reading
            reading = list(self._step_suite.body[: self._step_index])
            adding_up = list(suite.body[self._owner_index + 1 :])
            held += [owner.orelse] if isinstance(owner, cst.If) and owner.orelse is not None else []
        elif self._hoisted and anchor is self._anchor:
            reading, held = [anchor, *reading], []
        after = self._step_suite.body[self._step_index + 1 :]
        unscaled: cst.CSTNode | None = None
        calls = [c for s in reading for c in gradients.unknown_calls(parsed, s, ())]
        calls += [c for s in held for c in gradients.unknown_calls(parsed, s, self._known | self._counters())]
        certain = list(gradients.certain(parsed, function))
        mine = {*self._models(), *self._called, self.optimizer.text}
        for node in [*certain, *gradients.receivers(parsed, function, mine), *calls]:
            if not self._is_later(node, anchor):
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
                clip = gradients.clip(parsed, node)
                if clip is None:
                    raise self._refuse(node, "gradients are read, or may be, where they are now scaled")
                self._scale(clip)
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
            edit = Edit(start, start, f"{session.scaler}.unscale_({self.optimizer.text}){newline}")
            # A backward that is put before the same statement comes first.
            self.edits.insert(len(self.edits) if unscaled is anchor else 0, edit)

    def _is_later(self, node: cst.CSTNode, anchor: cst.CSTNode) -> bool:
        """Whether a node of the statement that holds the backward may run after the backward, and is not part of it."""
        parsed = self._parsed
        if any(flow.contains(parsed, b, node) for b in [self._block, *self._plain]):
            return False
        if not flow.contains(parsed, anchor, node) or (anchor is not self._at and self._at is not self._anchor):
            return True
        repeated = any(
            isinstance(a, cst.For | cst.While) and flow.contains(parsed, anchor, a) for a in parsed.ancestors(self._at)
        )
        return repeated or parsed.span(node) > parsed.span(self._block)

    def _counters(self) -> set[str]:
        """The variables of the loops around the backward."""
        loops = (a for a in self._parsed.ancestors(self._at) if isinstance(a, cst.For))
        return {n.value for loop in loops for n in flow.names(self._parsed, loop.target)}

    def _scale(self, bound: cst.BaseExpression) -> None:
        """Clips scaled gradients by a bound that is scaled, too."""
        source = self._parsed.source(bound)
        simple = isinstance(bound, cst.Name | cst.Attribute | cst.Float | cst.Integer | cst.Subscript | cst.Call)
        text = f"{source if simple else f'({source})'} * {self._session.scaler}.get_scale()"
        edit = Edit(*self._parsed.span(bound), text)
        if edit not in self.edits:
            self.edits.append(edit)

    def _check_zeroed(self) -> None:
        """Unscaled gradients of one step must not add to scaled ones of the next."""
        models = self._models() | self._called
        before = self._common.body[self._begin]

        def is_ours(node: cst.BaseExpression) -> bool:
            return self.optimizer.same(self._parsed, node) or dotted(node) in models

        if self._session.scales and not paths.is_zeroed(self._parsed, before, self._step, is_ours):
            raise self._refuse(
                self._step,
                f"found no unconditional {self.optimizer.text}.zero_grad() between this step and the next backward: "
                "unscaled gradients would add to scaled ones",
            )


def _binds(node: cst.CSTNode, name: str) -> bool:
    """Whether a ``with`` statement binds a name."""
    if not isinstance(node, cst.With):
        return False
    return any(i.asname is not None and dotted(i.asname.name) == name for i in node.items)


def _statement(parsed: Parsed, node: cst.CSTNode) -> cst.CSTNode:
    return next(a for a in parsed.ancestors(node) if isinstance(a, cst.BaseStatement))


def _bare(parsed: Parsed, node: cst.CSTNode) -> str:
    return re.sub(r"\s+", "", parsed.source(node)).strip("()")


def _is_loss(node: cst.BaseExpression) -> bool:
    """Simple arithmetic, an item of a container, or the mean or sum of one."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return not node.args and node.func.attr.value in ("mean", "sum") and _is_loss(node.func.value)
    if isinstance(node, cst.Subscript):
        return _is_loss(node.value) and guards.is_pure(node)
    if isinstance(node, cst.BinaryOperation) and not isinstance(node.operator, cst.MatrixMultiply):
        return _is_loss(node.left) and _is_loss(node.right)
    return flow.is_plain(node)
