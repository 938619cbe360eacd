"""One ``with amp.scale_loss(...)`` block: its loss, its optimizers, and the plain backwards beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from ampctx_apex.migrate import flow, forward, guards
from ampctx_apex.migrate.analysis import Parsed, Use, dotted
from ampctx_apex.migrate.flow import NotUnderstood
from ampctx_apex.migrate.imports import indent_of
from ampctx_apex.migrate.report import Edit
from ampctx_apex.migrate.session import Session, bound
from ampctx_apex.migrate.variables import Variable, argument, call_sites, function_of, parameters, variable

_SCALE_LOSS = ["loss", "optimizers", "loss_id", "model", "delay_unscale"]
_SIMPLE = (cst.Name, cst.Attribute, cst.Subscript, cst.Call)


class Backward:
    """A block of ``scale_loss``, with the ``else: loss.backward()`` of the ``if`` around it.

    ``function``: the function that holds it. ``optimizers``: their names there. ``anchor``: the outermost statement
    that the backward is all of. ``parts``: the block and the plain backwards. ``calls``: their ``backward``.
    ``hoisted``: the backward now comes before ``anchor``, the rest of whose branches stays.

    Raises:
        NotUnderstood: the block cannot be rewritten; with the line and the reason.
    """

    def __init__(self, parsed: Parsed, session: Session, use: Use) -> None:
        assert use.call is not None
        self._parsed, self._session, self._call = parsed, session, use.call
        self.calls: list[cst.CSTNode] = []
        self.edits: list[Edit] = []
        self.hoisted = False
        with flow.about("backward"):
            self._read_block()
            self._read_guard()
        with flow.about("forward"):
            self._read_sites()
        self._write()

    @property
    def parts(self) -> list[cst.CSTNode]:
        return [self.block, *self._plain]

    def _refuse(self, node: cst.CSTNode, reason: str) -> NotUnderstood:
        return flow.refuse(self._parsed, node, reason)

    def _replace(self, node: cst.CSTNode, lines: list[str]) -> None:
        newline = self._parsed.tree.default_newline + indent_of(self._parsed, node)
        self.edits.append(Edit(*self._parsed.span(node), newline.join(lines)))

    # --- the block ----------------------------------------------------------------------------------------------------

    def _read_block(self) -> None:
        call, parsed, session = self._call, self._parsed, self._session
        item = parsed.parents[call]
        block = parsed.parents[item]
        if not isinstance(item, cst.WithItem) or not isinstance(block, cst.With) or len(block.items) != 1:
            raise self._refuse(call, "amp.scale_loss is not the only context of a with statement")
        given = bound(parsed, call, _SCALE_LOSS, "amp.scale_loss")
        loss, optimizers = given.pop("loss", None), given.pop("optimizers", None)
        self.function = function_of(parsed, block)
        listed = [e.value for e in optimizers.elements] if isinstance(optimizers, cst.List) else [optimizers]
        self.optimizers: list[Variable] = []
        for optimizer in listed:
            own = variable(parsed, optimizer)
            same = optimizer is not None and any(o.same(parsed, optimizer) for o in session.optimizers)
            given_here = own is not None and (own.owner is not None or own.text in parameters(self.function))
            if own is None or not (same or given_here or not session.is_local(block)):
                raise self._refuse(call, f"amp.scale_loss is not called for {session.names} alone")
            self.optimizers.append(own)
        for name, value in given.items():
            source = parsed.source(value)
            delayed = name in ("delay_unscale", "delay_overflow_check") and source != "True" and guards.is_pure(value)
            if name != "model" and not delayed and not (name == "loss_id" and guards.is_pure(value)):
                raise self._refuse(call, f"{name}={source}")
        if loss is None or not _is_loss(loss):
            raise self._refuse(call, "the loss is neither a variable nor simple arithmetic")
        self._check_body(block, item)
        self.block, self._loss = block, loss
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
        self.calls.append(backward.func)

    def _read_guard(self) -> None:
        """Finds ``if fp16: with amp.scale_loss ... else: loss.backward()``."""
        parsed = self._parsed
        self.anchor: cst.CSTNode = self.block
        self._plain: list[cst.Expr] = []
        self._head: cst.If | None = None
        found = guards.branch_condition(parsed, self._suite)
        if found is None:
            return
        head, _ = found
        others = [
            c
            for link in guards.chain(head)
            if link.body is not self._suite
            for c in flow.calls(link.body)
            if forward.last_name(c.func) == "backward"
        ]
        same = [c for c in others if _bare(parsed, c.func) == f"{_bare(parsed, self._loss)}.backward"]
        if not same:
            return
        for call in same:
            statement = parsed.parents[call]
            if not isinstance(statement, cst.Expr):
                raise self._refuse(call, "the result of a backward is used")
            flow.simple_statement(parsed, statement, "backward")
            self._plain.append(statement)
            self.calls.append(call.func)
        for link in guards.chain(head):
            if isinstance(link, cst.If) and not guards.is_pure(link.test):
                raise self._refuse(link, "the condition around amp.scale_loss calls a function")
        branches = list(guards.chain(head))
        bodies = [link.body for link in branches if link.body is not self._suite]
        if not isinstance(branches[-1], cst.Else) or not all(self._always(body) for body in bodies):
            raise self._refuse(head, "a branch beside amp.scale_loss has no backward")
        self.anchor = self._head = head

    def _always(self, suite: cst.BaseSuite) -> bool:
        """Whether each way through a suite runs one of the plain backwards."""
        for statement in suite.body:
            if any(self._parsed.parents[p] is statement for p in self._plain):
                return True
            if isinstance(statement, cst.With) and self._always(statement.body):
                return True
            links = list(guards.chain(statement)) if isinstance(statement, cst.If) else []
            if links and isinstance(links[-1], cst.Else) and all(self._always(link.body) for link in links):
                return True
        return False

    # --- what takes its place -----------------------------------------------------------------------------------------

    def _scaled(self, loss: cst.BaseExpression, arguments: tuple[str, ...]) -> str:
        source = self._parsed.source(loss)
        source = source if isinstance(loss, _SIMPLE) else f"({source})"
        return f"{self._session.scaler}.scale({source}.float()).backward({', '.join(arguments)})"

    def _write(self) -> None:
        parsed = self._parsed
        source = parsed.source(self.block)
        comments = [c.rstrip() for c in re.findall(r"#.*", source)] if "#" in source else []
        line = self._scaled(self._loss, self._arguments)
        if self._head is None:
            self._replace(self.block, [*comments, line])
            return
        bodies: list[Sequence[cst.CSTNode]] = [
            [s for s in link.body.body if not self._session.dead.is_dead(s)] for link in guards.chain(self._head)
        ]
        backwards = [self.block, *(parsed.parents[p] for p in self._plain)]
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
        self._replace(self.block, [*comments, line])
        for plain in self._plain:
            assert isinstance(plain.value, cst.Call)
            assert isinstance(plain.value.func, cst.Attribute)
            self._replace(plain, [self._scaled(plain.value.func.value, parsed.arguments(plain.value) or ())])

    def _hoist(self, comments: list[str], line: str, bodies: list[Sequence[cst.CSTNode]], longer: list[bool]) -> None:
        """Puts the backward before the ``if`` whose branches all begin with it. What follows stays in the branches."""
        parsed, head = self._parsed, self._head
        assert head is not None
        self.hoisted = True
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
        self.forward_at: cst.CSTNode = self.anchor
        self.forward_loss: cst.BaseExpression = self._loss
        given = {n.value for n in flow.names(parsed, self._loss)} & set(parameters(self.function))
        if not given - {"self"} or self.forward().made:
            return
        name = next(iter(given - {"self"}))
        site = self.site(self.function, self._loss, f"{name} comes from the caller")
        loss = argument(site, self.function, name)
        if loss is None:
            raise self._refuse(site, f"found no argument for {name}")
        self.forward_at, self.forward_loss = statement_of(parsed, site), loss

    def forward(self, apart: Sequence[cst.CSTNode] = ()) -> forward.Forward:
        """The statements that lead to the loss. ``apart``: nodes that must not be among them."""
        place = self._session.place
        return forward.Forward(self._parsed, self.forward_at, self.forward_loss, self.optimizers, place, apart)

    def site(self, function: cst.CSTNode, node: cst.CSTNode, reason: str) -> cst.Call:
        """The only call of a function."""
        sites = list(call_sites(self._parsed, function))
        if len(sites) != 1:
            raise self._refuse(node, f"{reason}, and this file has {len(sites)} calls of the function, not one")
        return sites[0]

    def steps(self, index: int) -> Sequence[cst.Attribute]:
        """The uses of ``step`` of an optimizer that belong to this block: here, or of the caller's variable."""
        parsed, optimizer = self._parsed, self.optimizers[index]
        found = list(steps_of(parsed, optimizer))
        own = [s for s in found if function_of(parsed, s) is self.function]
        if found or optimizer.text not in parameters(self.function):
            return own if optimizer.owner is not None and own else found
        given = [argument(s, self.function, optimizer.text) for s in call_sites(parsed, self.function)]
        there = variable(parsed, given[0]) if len(given) == 1 else None
        if there is None or there.same(parsed, self._call.args[1].value):
            return []
        self.optimizers[index] = there
        return self.steps(index)


def steps_of(parsed: Parsed, optimizer: Variable) -> Iterator[cst.Attribute]:
    """The uses of an optimizer's ``step`` in the file."""
    for node in optimizer.nodes(parsed):
        parent = parsed.parents[node]
        if isinstance(parent, cst.Attribute) and parent.value is node and parent.attr.value == "step":
            yield parent


def statement_of(parsed: Parsed, node: cst.CSTNode) -> cst.CSTNode:
    return next(a for a in parsed.ancestors(node) if isinstance(a, cst.BaseStatement))


def _binds(node: cst.CSTNode, name: str) -> bool:
    """Whether a ``with`` statement binds a name."""
    if not isinstance(node, cst.With):
        return False
    return any(i.asname is not None and dotted(i.asname.name) == name for i in node.items)


def _bare(parsed: Parsed, node: cst.CSTNode) -> str:
    return re.sub(r"[\s()]+", "", parsed.source(node))


def _is_loss(node: cst.BaseExpression) -> bool:
    """Simple arithmetic, an item of a container, or the mean or sum of one."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return not node.args and node.func.attr.value in ("mean", "sum") and _is_loss(node.func.value)
    if isinstance(node, cst.Subscript):
        return _is_loss(node.value) and guards.is_pure(node)
    if isinstance(node, cst.BinaryOperation) and not isinstance(node.operator, cst.MatrixMultiply):
        return _is_loss(node.left) and _is_loss(node.right)
    return flow.is_plain(node)
