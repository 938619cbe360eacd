"""Rewrites an O1 loop to torch.amp if all of it is understood. Otherwise the file stays, and the findings say why.

apex unscales at the end of a ``scale_loss`` block, torch in ``step`` or ``unscale_``. apex casts everywhere, torch
inside ``autocast`` only. So the tool traces which statements lead to the loss, which read gradients, and which use
outputs of the model later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from ampctx_apex.migrate import guards, loop, optimizers, parallel, to_ampctx, whole
from ampctx_apex.migrate.analysis import Binding, Parsed, Use
from ampctx_apex.migrate.backward import Backward
from ampctx_apex.migrate.flow import NotUnderstood, about, refuse
from ampctx_apex.migrate.report import Edit, Finding
from ampctx_apex.migrate.session import Session, without_optimizer
from ampctx_apex.migrate.targets import row

# The amp functions that a loop may use.
_SESSION = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")

_MESSAGES = {
    "apex.amp.initialize": (
        "torch casts inside torch.autocast only: code outside it, such as evaluation, now runs in fp32. torch's scale "
        "has no upper bound of 2**24"
    ),
    "apex.amp.scale_loss": "gradients stay scaled until scaler.unscale_ or scaler.step",
    "apex.amp.master_params": "gradients are unscaled first, or the bound of clipping is scaled",
    "apex.amp.state_dict": "saves torch's format from now on",
    "apex.amp.load_state_dict": (
        "reads torch's format. For older checkpoints use ampctx.GradScaler, which also reads apex's format"
    ),
    "apex.amp.register_half_function": "torch.autocast casts this function anyway",
    "apex.amp._amp_state.loss_scalers": "GradScaler's init_scale and get_scale",
}
_LOSSES = ". One scale serves all losses"
_STATIC = ". torch halves the scale after an overflow; with apex's static scale, inf reached the weights"


class Helper(NamedTuple):
    """A file that uses amp without calling ``initialize``: loops in files that import it may depend on it."""

    path: Path
    line: int
    text: str

    def concerns(self, parsed: Parsed) -> bool:
        """Whether a file imports this one, by its name or its package's, or this one imports that file."""
        stem = self.path.parent.name if self.path.stem == "__init__" else self.path.stem
        names = {stem, self.path.parent.name} - {Path(parsed.path).resolve().parent.name, ""}
        names.add(stem)
        return bool(names & _imported(parsed.text)) or Path(parsed.path).stem in _imported(self.text)


def _imported(text: str) -> set[str]:
    """The words of a file's import statements."""
    lines = re.findall(r"^[ \t]*(?:from|import)[ \t]+([^\n#]*(?:\([^)]*\))?)", text, flags=re.MULTILINE)
    return {word for line in lines for word in re.findall(r"\w+", line)}


def helpers(files: Iterable[Parsed]) -> list[Helper]:
    found = []
    for parsed in files:
        uses = [u for b in parsed.bindings for u in b.uses if u.name.startswith("apex.amp.")]
        if uses and not any(u.name == "apex.amp.initialize" for u in uses):
            found.append(Helper(Path(parsed.path).resolve(), parsed.line(uses[0].root), parsed.text))
    return found


def plan(parsed: Parsed, others: Sequence[Helper] = ()) -> tuple[list[Edit], list[Finding]]:
    """The edits and findings of a file. ``others``: the result of ``helpers()``."""
    gone = {b for b in parsed.bindings if _goes(b)}
    try:
        if not any(_is_amp(u) for b in gone for u in b.uses):
            raise NotUnderstood("this file has no O1 loop")
        with about("names"):
            return _plan(parsed, gone, _uses(parsed, gone, others))
    except NotUnderstood as reason:
        edits, findings = to_ampctx.plan(parsed, only="torch")
        return edits, [_explained(f, reason) for f in findings]


def _plan(parsed: Parsed, gone: set[Binding], uses: dict[str, list[Use]]) -> tuple[list[Edit], list[Finding]]:
    tests = [(u, guards.tested(parsed, u)) for u in uses["tests"]]
    dead = guards.Dead(parsed, _whole(gone), [u.chain for u in uses["tests"]])
    with about("initialize"):
        alone = {u: without_optimizer(parsed, u) for u in uses["initialize"]}
        for statement in alone.values():
            if statement is not None:
                dead.add(statement)
        begins = [u for u, statement in alone.items() if statement is None]
        if not begins:
            raise refuse(parsed, uses["initialize"][0].root, "amp.initialize is not called with an optimizer")
    if not uses["scale_loss"]:
        raise NotUnderstood("amp.scale_loss is not called in this file")
    later = [u for name in _SESSION[1:] for u in uses[name]]
    scales = [guards.read_scale(parsed, u) for u in uses["scale"]]
    first = [guards.first_scale(parsed, u) for u in uses["first"]]
    if len(first) > 1:
        raise refuse(parsed, uses["first"][1].root, "a second assignment of the loss scale")
    for statement in first:
        assert statement is not None
        dead.add(statement)
    for use in uses["casts"]:
        assert use.call is not None
        dead.add(parsed.parents[use.call])
    session = Session(parsed, [u.call for u in begins if u.call is not None], later, dead, *first)
    torch_edits = whole.check_torch(parsed)
    backwards = [Backward(parsed, session, use) for use in uses["scale_loss"]]
    with about("backward"):
        whole.check_backwards(parsed, backwards)
    loops = loop.read(parsed, session, backwards)
    with about("step"):
        whole.check(parsed, session, loops)
    removed = dead.edits()
    edits = [*torch_edits, *(_after(e, removed) for e in session.edits), *(e for each in loops for e in each.edits)]
    edits += [Edit(*parsed.span(n), f"{session.scaler}.get_scale()") for n in scales if n is not None]
    edits += [whole.master_params(parsed, session, u) for u in uses["master_params"]]
    edits += [whole.checkpoint(parsed, session, u) for name in ("state_dict", "load_state_dict") for u in uses[name]]
    edits += [e for u in uses["parallel"] for e in parallel.replaced(parsed, u)]
    edits += [e for u in uses["optimizers"] for e in optimizers.replaced(parsed, u)]
    edits += [e for _, e in tests if e is not None] + guards.availability(parsed)
    other_edits, findings = to_ampctx.plan(parsed, only="torch", gone=gone)
    edits = [e for e in dict.fromkeys([*edits, *other_edits]) if not any(_within(e, r) for r in removed)]
    for use in _distinct(gone):
        more = _STATIC if use.name.endswith("initialize") and session.static else ""
        more += _LOSSES if "num_losses" in parsed.source(use.call or use.chain) else ""
        known = _MESSAGES | {name: parallel.MESSAGES[target] for name, target in parallel.TARGETS.items()}
        known |= optimizers.MESSAGES
        message = known.get(use.name, "always there now") + more
        findings.append(parsed.finding(use.chain, use.name, "adapted", message, use.call))
    removed = [r for r in removed if not any(e.start <= r.start and r.end <= e.end for e in edits)]
    return [*edits, *removed], sorted(set(findings), key=lambda f: (f.line, f.column))


def _within(edit: Edit, removed: Edit) -> bool:
    """Whether an edit is lost in a statement that goes. What is inserted before or after the statement stays."""
    if edit.start == edit.end:
        return removed.start < edit.start < removed.end
    return removed.start <= edit.start and edit.end <= removed.end


def _after(edit: Edit, removed: list[Edit]) -> Edit:
    """An edit that must not be lost: what it inserts comes after the statement that goes there."""
    at = next((r.end for r in removed if edit.start == edit.end and _within(edit, r)), None)
    return edit if at is None else Edit(at, at, edit.new)


def _whole(gone: set[Binding]) -> list[cst.CSTNode]:
    """The import statements all of whose names go."""
    statements = {id(b.statement): b.statement for b in gone}
    aliases = {id(b.alias) for b in gone}
    return [
        s for s in statements.values() if isinstance(s.names, cst.ImportStar) or all(id(a) in aliases for a in s.names)
    ]


def _goes(binding: Binding) -> bool:
    """Whether an import goes once the loops are torch's: of amp, of what torch has, of names that nothing uses."""
    if binding.target == "apex.amp" or binding.target.startswith("apex.amp."):
        return True
    if not binding.uses:
        return True
    if all(u.name in optimizers.TARGETS and u.call is not None for u in binding.uses):
        return True
    return any(_is_amp(u) or u.name in parallel.TARGETS for u in binding.uses)


def _is_amp(use: Use) -> bool:
    return use.name == "apex.amp" or use.name.startswith("apex.amp.")


def _explained(finding: Finding, reason: NotUnderstood) -> Finding:
    entry = row(finding.name).entry
    refused = entry is not None and not entry.is_served
    if finding.status != "person" or refused or not finding.name.startswith("apex.amp"):
        return finding
    link = f"docs/to_torch_amp.md#{reason.topic}" if reason.topic else finding.link
    return dataclasses.replace(finding, message=f"not rewritten: {reason}", link=link)


def _uses(parsed: Parsed, gone: set[Binding], others: Sequence[Helper]) -> dict[str, list[Use]]:
    """The uses of amp by function name. Raises NotUnderstood if a loop cannot be made of them."""
    for binding in parsed.bindings:
        at = f"line {parsed.line(binding.statement)}"
        if binding.alias is None and (binding.uses or binding not in gone or binding.target.startswith("apex.amp")):
            raise NotUnderstood(f"{at} imports everything from {binding.target}")
        for use in binding.uses:
            if binding in gone and use.uncertain and not guards.is_replaced_when_missing(parsed, use, gone):
                raise NotUnderstood(
                    f"{binding.local} in line {parsed.line(use.root)} may be something other than apex's"
                )
            called = use.name.removeprefix("apex.amp.") in _SESSION and use.call is not None
            called = called or use.name in parallel.TARGETS or guards.first_scale(parsed, use) is not None
            called = called or guards.is_cast_anyway(parsed, use) or guards.read_scale(parsed, use) is not None
            called = called or (use.name in optimizers.TARGETS and use.call is not None)
            if binding in gone and not called and not _is_test(parsed, use):
                raise NotUnderstood(f"line {parsed.line(use.root)} uses {use.name}, which torch.amp lacks")
    if parsed.imports or parsed.private:
        node = parsed.imports[0].node if parsed.imports else parsed.private[0][0]
        raise NotUnderstood(f"line {parsed.line(node)} uses private or dynamically imported apex names")
    if match := re.search(r"\b(autocast|GradScaler)\b", parsed.text):
        with about("torch-branch"):
            raise NotUnderstood(f"the file already uses {match[1]}: keep that branch and delete apex's")
    manual = [f for f in to_ampctx.plan(parsed, only="torch", gone=gone)[1] if f.status == "person"]
    if manual:
        raise NotUnderstood(f"line {manual[0].line} uses {manual[0].name}, which must go first (--to ampctx)")
    if not any(u.name == "apex.amp.initialize" for b in gone for u in b.uses):
        with about("other-files"):
            raise NotUnderstood("amp.initialize is not called in this file")
    for helper in others:
        if helper.concerns(parsed):
            with about("other-files"):
                raise NotUnderstood(f"{helper.path}:{helper.line} also uses amp and may belong to this loop")
    uses: dict[str, list[Use]] = {
        name: [] for name in [*_SESSION, "tests", "parallel", "optimizers", "first", "casts", "scale"]
    }
    for use in sorted(_distinct(gone), key=lambda u: parsed.span(u.root)):
        kind = "tests" if _is_test(parsed, use) else "parallel" if use.name in parallel.TARGETS else ""
        kind = "optimizers" if use.name in optimizers.TARGETS else kind
        kind = "scale" if guards.read_scale(parsed, use) is not None else kind
        kind = "casts" if guards.is_cast_anyway(parsed, use) else kind
        kind = "first" if guards.first_scale(parsed, use) is not None else kind
        uses[kind or use.name.removeprefix("apex.amp.")].append(use)
    return uses


def _distinct(bindings: Iterable[Binding]) -> list[Use]:
    """The uses of names, once each: two imports may reach the same place."""
    return list({id(u.root): u for b in bindings for u in b.uses}.values())


def _is_test(parsed: Parsed, use: Use) -> bool:
    return use.name in ("apex", "apex.amp") and guards.tested(parsed, use) is not None
