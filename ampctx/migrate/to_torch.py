"""Rewrites an O1 loop to torch.amp if all of it is understood. Otherwise the file stays, and the findings say why.

apex unscales at the end of a ``scale_loss`` block, torch in ``step`` or ``unscale_``. apex casts everywhere, torch
inside ``autocast`` only. So the tool traces which statements lead to the loss, which read gradients, and which use
outputs of the model later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ampctx.migrate import to_ampctx
from ampctx.migrate.analysis import Binding, Parsed, Use
from ampctx.migrate.flow import NotUnderstood
from ampctx.migrate.loop import Loop
from ampctx.migrate.report import Edit, Finding
from ampctx.migrate.targets import row

# The amp functions that a loop may use.
_SESSION = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")

_MESSAGES = {
    "apex.amp.initialize": (
        "torch casts inside torch.autocast only: code outside it, such as evaluation, now runs in fp32. torch's scale "
        "has no upper bound of 2**24"
    ),
    "apex.amp.scale_loss": "gradients stay scaled until scaler.unscale_ or scaler.step",
    "apex.amp.master_params": "scaler.unscale_ now unscales gradients first",
    "apex.amp.state_dict": "saves torch's format from now on",
    "apex.amp.load_state_dict": (
        "reads torch's format. For older checkpoints use ampctx.GradScaler, which also reads apex's format"
    ),
}
_STATIC = ". torch halves the scale after an overflow; with apex's static scale, inf reached the weights"


def helper(files: Iterable[Parsed]) -> str | None:
    """A file and line that use amp without calling ``initialize``: loops in other files may depend on it."""
    for parsed in files:
        uses = [u for b in parsed.bindings for u in b.uses if u.name.startswith("apex.amp.")]
        if uses and not any(u.name == "apex.amp.initialize" for u in uses):
            return f"{parsed.path}:{parsed.line(uses[0].root)}"
    return None


def plan(parsed: Parsed, helper: str | None) -> tuple[list[Edit], list[Finding]]:
    """The edits and findings of a file. ``helper``: the result of ``helper()``."""
    gone = {
        b
        for b in parsed.bindings
        if any(_is_amp(u) for u in b.uses) or b.target == "apex.amp" or b.target.startswith("apex.amp.")
    }
    try:
        if not gone:
            raise NotUnderstood("this file has no O1 loop")
        found = Loop(parsed, _uses(parsed, gone, helper))
        loop_edits = found.edits
    except NotUnderstood as reason:
        edits, findings = to_ampctx.plan(parsed, only="torch")
        return edits, [_explained(f, str(reason)) for f in findings]
    edits, findings = to_ampctx.plan(parsed, only="torch", gone=gone)
    for use in dict.fromkeys(u for b in gone for u in b.uses):
        message = _MESSAGES[use.name] + (_STATIC if use.name.endswith("initialize") and found.static else "")
        findings.append(parsed.finding(use.chain, use.name, "adapted", message, use.call))
    return [*loop_edits, *edits], sorted(set(findings), key=lambda f: (f.line, f.column))


def _is_amp(use: Use) -> bool:
    return use.name == "apex.amp" or use.name.startswith("apex.amp.")


def _explained(finding: Finding, reason: str) -> Finding:
    entry = row(finding.name).entry
    refused = entry is not None and not entry.is_served
    if finding.status != "person" or refused or not finding.name.startswith("apex.amp"):
        return finding
    return dataclasses.replace(finding, message=f"not rewritten: {reason}")


def _uses(parsed: Parsed, gone: set[Binding], helper: str | None) -> dict[str, list[Use]]:
    """The uses of amp by function name. Raises NotUnderstood if a loop cannot be made of them."""
    for binding in parsed.bindings:
        at = f"line {parsed.line(binding.statement)}"
        if binding.alias is None:
            raise NotUnderstood(f"{at} imports everything from {binding.target}")
        for use in binding.uses:
            if binding in gone and use.uncertain:
                raise NotUnderstood(
                    f"{binding.local} in line {parsed.line(use.root)} may be something other than apex's"
                )
            if binding in gone and (use.name.removeprefix("apex.amp.") not in _SESSION or use.call is None):
                raise NotUnderstood(f"line {parsed.line(use.root)} uses {use.name}, which torch.amp lacks")
    if parsed.imports or parsed.private:
        node = parsed.imports[0].node if parsed.imports else parsed.private[0][0]
        raise NotUnderstood(f"line {parsed.line(node)} uses private or dynamically imported apex names")
    if match := re.search(r"\b(autocast|GradScaler)\b", parsed.text):
        raise NotUnderstood(f"the file already uses {match[1]}")
    others = [f for f in to_ampctx.plan(parsed, only="torch", gone=gone)[1] if f.status == "person"]
    if others:
        raise NotUnderstood(f"line {others[0].line} uses {others[0].name}, which must go first (--to ampctx)")
    if not any(u.name == "apex.amp.initialize" for b in gone for u in b.uses):
        raise NotUnderstood("amp.initialize is not called in this file")
    if helper is not None:
        raise NotUnderstood(f"{helper} also uses amp and may belong to this loop")
    uses: dict[str, list[Use]] = {name: [] for name in _SESSION}
    for use in dict.fromkeys(u for b in gone for u in b.uses):
        uses[use.name.removeprefix("apex.amp.")].append(use)
    return uses
