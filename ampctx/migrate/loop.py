"""One O1 training loop: the conditions for rewriting it to torch.amp, and the edits."""

from __future__ import annotations

import re

import libcst as cst
from libcst import metadata as meta

from ampctx.migrate import flow, options, paths
from ampctx.migrate.analysis import Parsed, Use, dotted
from ampctx.migrate.flow import NotUnderstood
from ampctx.migrate.imports import indent_of
from ampctx.migrate.report import Edit
from ampctx.migrate.to_ampctx import hidden

_INITIALIZE = ["models", "optimizers", "enabled", "opt_level"]


class Loop:
    """An O1 loop and its ``edits``.

    Raises:
        NotUnderstood: the loop cannot be rewritten; with the line and the reason.
    """

    def __init__(self, parsed: Parsed, uses: dict[str, list[Use]]) -> None:
        self._parsed = parsed
        self._uses = uses
        self.edits: list[Edit] = []
        self._read_initialize()
        self._read_block()
        self._check_scope()
        self._read_step()
        self._read_forward()
        self._read_gradients()
        self._check_zeroed()
        self._read_checkpoints()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _refuse(self, node: cst.CSTNode, reason: str) -> NotUnderstood:
        return flow.refuse(self._parsed, node, reason)

    def _only(self, name: str) -> cst.Call:
        found = self._uses[name]
        if not found:
            raise NotUnderstood(f"amp.{name} is not called in this file")
        if len(found) > 1:
            raise self._refuse(found[1].root, f"a second call of amp.{name}")
        assert found[0].call is not None
        return found[0].call

    def _bound(self, call: cst.Call, names: list[str], what: str) -> dict[str, cst.BaseExpression]:
        """The arguments of a call by parameter name."""
        given: dict[str, cst.BaseExpression] = {}
        for i, argument in enumerate(call.args):
            if argument.star or (argument.keyword is None and i >= len(names)):
                raise self._refuse(call, f"cannot match the arguments of {what} to its parameters")
            given[names[i] if argument.keyword is None else argument.keyword.value] = argument.value
        return given

    def _fresh(self, *wanted: str) -> str:
        """The first of these names that the file does not use."""
        for name in wanted:
            if not re.search(rf"\b{name}\b", self._parsed.text):
                return name
        raise NotUnderstood(f"the names {', '.join(wanted)} are all taken")

    def _of_loop(self, name: cst.Name, local: str) -> bool:
        """Whether a name is the variable ``local`` in the loop's scope."""
        return name.value == local and any(a.scope is self._scope for a in self._parsed.assignments(name))

    def _names(self, local: str) -> list[cst.Name]:
        return [n for n in self._parsed.nodes if isinstance(n, cst.Name) and self._of_loop(n, local)]

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_initialize(self) -> None:
        parsed, call = self._parsed, self._only("initialize")
        given = self._bound(call, _INITIALIZE, "amp.initialize")
        model, optimizer = given.pop("models", None), given.pop("optimizers", None)
        if not isinstance(model, cst.Name) or not isinstance(optimizer, cst.Name):
            raise self._refuse(call, "amp.initialize is not called with one model variable and one optimizer variable")
        self.model, self.optimizer = model.value, optimizer.value
        statement = parsed.parents[call]
        targets = [dotted(t.target) for t in statement.targets] if isinstance(statement, cst.Assign) else []
        if isinstance(statement, cst.Assign) and isinstance(statement.targets[0].target, cst.Tuple):
            targets = [dotted(e.value) for e in statement.targets[0].target.elements]
            targets *= len(statement.targets)
        if not isinstance(statement, cst.Expr) and targets != [self.model, self.optimizer]:
            raise self._refuse(call, f"amp.initialize is not assigned back to {self.model}, {self.optimizer}")
        self._initialize = flow.simple_statement(parsed, statement, "amp.initialize")
        scope = parsed.scopes[call]
        assert scope is not None
        self._scope: meta.Scope = scope
        self._write_initialize(statement, options.read(parsed, call, given))

    def _write_initialize(self, statement: cst.CSTNode, given: options.Options) -> None:
        self.static = given.static
        self._scales = "enabled=False" not in given.scaler
        self.scaler = self._fresh("scaler", "grad_scaler", "amp_grad_scaler")
        self.device = self._fresh("device_type", "amp_device_type", "autocast_device_type")
        self.autocast = f"torch.autocast({', '.join([self.device, 'dtype=torch.float16', *given.autocast])})"
        lines = [
            f"{self.device} = next({self.model}.parameters()).device.type",
            f"{self.scaler} = torch.amp.GradScaler({', '.join([self.device, *given.scaler])})",
        ]
        self._replace(statement, lines)

    def _replace(self, node: cst.CSTNode, lines: list[str]) -> None:
        newline = self._parsed.tree.default_newline + indent_of(self._parsed, node)
        self.edits.append(Edit(*self._parsed.span(node), newline.join(lines)))

    def _read_block(self) -> None:
        call = self._only("scale_loss")
        parsed, item = self._parsed, self._parsed.parents[call]
        block = parsed.parents[item]
        if not isinstance(item, cst.WithItem) or not isinstance(block, cst.With) or len(block.items) != 1:
            raise self._refuse(call, "amp.scale_loss is not the only context of a with statement")
        if parsed.function(block) is not parsed.function(self._initialize):
            raise self._refuse(call, "amp.scale_loss is in another function than amp.initialize")
        given = self._bound(call, ["loss", "optimizers", "loss_id", "model", "delay_unscale"], "amp.scale_loss")
        loss, optimizer = given.pop("loss", None), given.pop("optimizers", None)
        if isinstance(optimizer, cst.List) and len(optimizer.elements) == 1:
            optimizer = optimizer.elements[0].value
        if not isinstance(optimizer, cst.Name) or not self._of_loop(optimizer, self.optimizer):
            raise self._refuse(call, f"amp.scale_loss is not called for {self.optimizer} alone")
        for name, value in given.items():
            if name == "model":
                continue
            if name not in ("loss_id", "delay_unscale", "delay_overflow_check") or parsed.source(value) not in (
                "0",
                "False",
            ):
                raise self._refuse(call, f"{name}={parsed.source(value)}")
        if loss is None or not flow.is_plain(loss):
            raise self._refuse(call, "the loss is neither a variable nor simple arithmetic")
        self._check_body(block, item)
        self._block, self._loss = block, loss
        if self._path_from_initialize(block) is None:
            raise self._refuse(call, "amp.scale_loss does not follow amp.initialize in the same block or a loop in it")
        self._suite, self._index = parsed.blocks(block)[0]
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
        if sum(n.value == name.value for n in flow.names(self._parsed, self._parsed.tree)) != 2:
            raise self._refuse(block, f"{name.value} is used outside of the block")
        self._arguments = self._parsed.arguments(backward) or ()

    def _path_from_initialize(self, node: cst.CSTNode) -> list[cst.CSTNode] | None:
        """The statements between ``node`` and the block of amp.initialize; None if it does not come after it there."""
        suite, first = self._parsed.blocks(self._initialize)[0]
        path: list[cst.CSTNode] = []
        for block, index in self._parsed.blocks(node):
            if block is suite:
                return path if index > first else None
            parent = self._parsed.parents.get(block)
            if not isinstance(parent, cst.For | cst.While | cst.If | cst.With):
                return None
            path.append(parent)
        return None

    def _check_scope(self) -> None:
        """Refuses statements that rule out a rewrite anywhere in the file, and a ``torch`` that is not the package."""
        parsed = self._parsed
        if not any(
            isinstance(small, cst.Import) and any(a.asname is None and dotted(a.name) == "torch" for a in small.names)
            for line in parsed.tree.body
            if isinstance(line, cst.SimpleStatementLine)
            for small in line.body
        ):
            raise NotUnderstood("the file has no 'import torch' at its top level")
        if hidden(parsed, {"torch"}):
            raise NotUnderstood("the file uses torch as a variable")
        for node in parsed.nodes:
            inside = self._block in list(parsed.ancestors(node))
            if isinstance(node, cst.Attribute) and node.attr.value == "backward" and not inside:
                raise self._refuse(node, "a second backward")
            if isinstance(node, cst.Attribute) and dotted(node).endswith("autograd.grad"):
                raise self._refuse(node, "torch.autograd.grad would see a scaled loss")
        for name in self._names(self.optimizer):
            if parsed.function(name) is not parsed.function(self._initialize):
                raise self._refuse(name, f"another function uses {self.optimizer} and may be its closure")
            if isinstance(parsed.parents[name], cst.Assign | cst.AnnAssign | cst.NamedExpr) and (
                parsed.contexts.get(name) is meta.ExpressionContext.LOAD
            ):
                raise self._refuse(name, f"{self.optimizer} gets a second name, which may call step()")
        for name in self._names(self.model):
            parent = parsed.parents[name]
            attribute = parent.attr.value if isinstance(parent, cst.Attribute) and parent.value is name else ""
            if attribute in ("to", "cuda", "cpu") and parsed.span(name) > parsed.span(self._initialize):
                raise self._refuse(name, f"{self.model} may move to another device after amp.initialize")

    def _read_step(self) -> None:
        parsed = self._parsed
        steps = []
        for name in self._names(self.optimizer):
            parent = parsed.parents[name]
            if flow.contains(parsed, self._initialize, name):
                continue
            if isinstance(parent, cst.Attribute) and parent.attr.value == "step":
                steps.append(parsed.parents[parent])
            elif parsed.contexts[name] is not meta.ExpressionContext.LOAD and parsed.span(name) > parsed.span(
                self._initialize
            ):
                raise self._refuse(name, f"{self.optimizer} is assigned again")
        if len(steps) != 1:
            raise self._refuse(
                steps[1] if steps else self._block, f"found {len(steps)} calls of {self.optimizer}.step(), expected one"
            )
        step = steps[0]
        if not isinstance(step, cst.Call) or step.args or not isinstance(parsed.parents[step], cst.Expr):
            raise self._refuse(step, f"{self.optimizer}.step takes a closure, or its result is used")
        self._step = flow.simple_statement(parsed, parsed.parents[step], f"{self.optimizer}.step()")
        (suite, index), *outer = parsed.blocks(self._step)
        self._step_suite, self._step_index = suite, index
        self.conditional = suite is not self._suite
        place = (suite, index)
        if self.conditional:
            owner = parsed.parents.get(suite)
            if (
                not isinstance(owner, cst.If)
                or not outer
                or outer[0][0] is not self._suite
                or parsed.parents[owner] is not self._suite
            ):
                raise self._refuse(
                    step,
                    f"{self.optimizer}.step() is neither in the block that holds amp.scale_loss nor in an if there",
                )
            if not flow.is_plain(owner.test, logic=True):
                raise self._refuse(owner, f"the condition around {self.optimizer}.step() calls a function")
            place = outer[0]
        if place[1] <= self._index:
            raise self._refuse(step, f"{self.optimizer}.step() comes before amp.scale_loss")
        self._owner_index = place[1]
        self._replace(parsed.parents[step], [f"{self.scaler}.step({self.optimizer})", f"{self.scaler}.update()"])

    def _read_forward(self) -> None:
        parsed, body = self._parsed, self._suite.body
        forward = flow.Forward(parsed, self._suite, self._index, self._loss, self.model)
        first, last = forward.first, forward.last
        flow.check_inside(parsed, [body[i] for i in range(first, last + 1)], self.optimizer)
        flow.check_outputs(parsed, forward, self._scope, self._block)
        self.edits += flow.wrapped(parsed, body[first], body[last], f"with {self.autocast}:")
        comments = re.findall(r"#.*", parsed.source(self._block)) if "#" in parsed.source(self._block) else []
        loss = parsed.source(self._loss)
        loss = loss if isinstance(self._loss, cst.Name | cst.Attribute) else f"({loss})"
        line = f"{self.scaler}.scale({loss}.float()).backward({', '.join(self._arguments)})"
        self._replace(self._block, [*(c.rstrip() for c in comments), line])

    def _read_gradients(self) -> None:
        """Gradients are now scaled between backward and step: inserts ``unscale_`` before the first reader."""
        parsed, suite = self._parsed, self._suite
        between: list[cst.CSTNode] = [suite.body[i] for i in range(self._index + 1, self._owner_index)]
        reading = list(self._step_suite.body[: self._step_index]) if self.conditional else between
        after = self._step_suite.body[self._step_index + 1 :]
        owner = suite.body[self._owner_index]
        adding_up: list[cst.CSTNode] = [*suite.body[self._owner_index + 1 :]] if self.conditional else []
        if self.conditional and isinstance(owner, cst.If) and owner.orelse is not None:
            between.append(owner.orelse)
        unscaled: cst.CSTNode | None = None
        window = between if not self.conditional else [*between, *reading]
        calls = [c for s in window for c in flow.unknown_calls(s)]
        for node in [*flow.readers(parsed, self.model, self.optimizer), *calls]:
            statement = next((s for s in reading if flow.contains(parsed, s, node)), None)
            if statement is not None:
                if flow.is_zero_grad(parsed, node):
                    raise self._refuse(node, "gradients are zeroed between backward and step")
                if unscaled is None or parsed.span(statement) < parsed.span(unscaled):
                    unscaled = statement
            elif flow.is_certain(node) or (self.conditional and any(flow.contains(parsed, s, node) for s in between)):
                raise self._refuse(node, "gradients are read, or may be, where they are now scaled")
            elif flow.is_zero_grad(parsed, node):
                continue
            elif any(flow.contains(parsed, s, node) for s in adding_up):
                raise self._refuse(node, "gradients may be read before the step, where they are now scaled")
            elif any(flow.contains(parsed, s, node) for s in after):
                # Code after the step may read gradients, which a fused optimizer leaves scaled.
                unscaled = unscaled or self._step
        for use in self._uses["master_params"]:
            self._write_master_params(use)
        if unscaled is not None:
            first = self._step_suite.body.index(unscaled)
            paths.check_reached(parsed, self._step_suite.body[first : self._step_index], self._step)
            start = parsed.span(unscaled)[0]
            newline = parsed.tree.default_newline + indent_of(parsed, unscaled)
            self.edits.insert(0, Edit(start, start, f"{self.scaler}.unscale_({self.optimizer}){newline}"))

    def _check_zeroed(self) -> None:
        """Unscaled gradients of one step must not add to scaled ones of the next."""

        def is_ours(node: cst.BaseExpression) -> bool:
            return isinstance(node, cst.Name) and any(self._of_loop(node, n) for n in (self.model, self.optimizer))

        if self._scales and not paths.is_zeroed(self._parsed, self._block, self._step, is_ours):
            raise self._refuse(
                self._step,
                f"found no unconditional {self.optimizer}.zero_grad() between this step and the next backward: "
                "unscaled gradients would add to scaled ones",
            )

    def _write_master_params(self, use: Use) -> None:
        assert use.call is not None
        given = self._bound(use.call, ["optimizer"], "amp.master_params")
        if [self._parsed.source(v) for v in given.values()] != [self.optimizer]:
            raise self._refuse(use.call, f"amp.master_params is not called for {self.optimizer}")
        if self._path_from_initialize(use.call) is None:
            raise self._refuse(
                use.call, "amp.master_params does not follow amp.initialize in the same block or a loop in it"
            )
        text = f'[p for group in {self.optimizer}.param_groups for p in group["params"]]'
        self.edits.append(Edit(*self._parsed.span(use.call), text))

    def _read_checkpoints(self) -> None:
        for name in ("state_dict", "load_state_dict"):
            for use in self._uses[name]:
                assert use.call is not None
                if self._parsed.function(use.call) is not self._parsed.function(self._initialize):
                    raise self._refuse(use.call, f"amp.{name} is called in another function than amp.initialize")
                if self._path_from_initialize(use.call) is None:
                    raise self._refuse(use.call, f"amp.{name} is called where amp.initialize may not have run")
                if len(use.call.args) != (name == "load_state_dict"):
                    raise self._refuse(use.call, f"amp.{name} has arguments that torch's lacks")
                self.edits.append(Edit(*self._parsed.span(use.chain), f"{self.scaler}.{name}"))
