"""O1 loops in torch.amp's words, where the loop is understood as a whole; everything else is left and explained.

apex unscales when a ``scale_loss`` block ends, torch when ``step`` or ``unscale_`` is called, and apex casts
everywhere, torch inside ``autocast`` alone. So it has to be seen which statements lead to the loss, where gradients are
read, and what is done with outputs later.
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

# What a loop may use of apex.
_SESSION = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")

_MESSAGES = {
    "apex.amp.initialize": (
        "torch casts inside torch.autocast alone: code outside of it, evaluation for one, now runs in fp32, where apex "
        "cast everywhere; and the scale of torch has no ceiling of 2**24"
    ),
    "apex.amp.scale_loss": "gradients stay scaled until scaler.unscale_ or scaler.step",
    "apex.amp.master_params": "gradients are unscaled by scaler.unscale_ first",
    "apex.amp.state_dict": "torch's format from now on",
    "apex.amp.load_state_dict": (
        "reads torch's format; checkpoints of before have apex's, which ampctx.GradScaler reads in the place of torch's"
    ),
}
_STATIC = "; torch halves the scale after an overflow, where a static scale of apex let inf into the weights"


def helper(files: Iterable[Parsed]) -> str | None:
    """A place that uses amp without an ``initialize`` of its own, so that loops in other files may depend on it."""
    for parsed in files:
        uses = [u for b in parsed.bindings for u in b.uses if u.name.startswith("apex.amp.")]
        if uses and not any(u.name == "apex.amp.initialize" for u in uses):
            return f"{parsed.path}:{parsed.line(uses[0].root)}"
    return None


def plan(parsed: Parsed, helper: str | None) -> tuple[list[Edit], list[Finding]]:
    """The edits of a file and what was found in it. ``helper``: see there."""
    gone = {
        b
        for b in parsed.bindings
        if any(_is_amp(u) for u in b.uses) or b.target == "apex.amp" or b.target.startswith("apex.amp.")
    }
    try:
        if not gone:
            raise NotUnderstood("there is no O1 loop in this file")
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
    refused = entry is not None and entry.status == "refused"
    if finding.status != "person" or refused or not finding.name.startswith("apex.amp"):
        return finding
    return dataclasses.replace(finding, message=f"left as it is: {reason}")


def _uses(parsed: Parsed, gone: set[Binding], helper: str | None) -> dict[str, list[Use]]:
    """The uses of amp in a file, by the last part of their names, if a loop can be made of them."""
    for binding in parsed.bindings:
        at = f"line {parsed.line(binding.statement)}"
        if binding.alias is None:
            raise NotUnderstood(f"{at} imports everything from {binding.target}")
        for use in binding.uses:
            if binding in gone and use.uncertain:
                raise NotUnderstood(f"{binding.local} in line {parsed.line(use.root)} is not apex's in all cases")
            if binding in gone and (use.name.removeprefix("apex.amp.") not in _SESSION or use.call is None):
                raise NotUnderstood(f"line {parsed.line(use.root)} uses {use.name}, which torch.amp has not")
    if parsed.imports or parsed.private:
        node = parsed.imports[0].node if parsed.imports else parsed.private[0][0]
        raise NotUnderstood(f"line {parsed.line(node)} reaches for more of apex")
    if match := re.search(r"\b(autocast|GradScaler)\b", parsed.text):
        raise NotUnderstood(f"the file uses {match[1]} already")
    others = [f for f in to_ampctx.plan(parsed, only="torch", gone=gone)[1] if f.status == "person"]
    if others:
        raise NotUnderstood(f"line {others[0].line} uses {others[0].name}, which has to go first (--to ampctx)")
    if not any(u.name == "apex.amp.initialize" for b in gone for u in b.uses):
        raise NotUnderstood("amp.initialize is not called in this file")
    if helper is not None:
        raise NotUnderstood(f"{helper} uses amp as well, and may belong to this loop")
    uses: dict[str, list[Use]] = {name: [] for name in _SESSION}
    for use in dict.fromkeys(u for b in gone for u in b.uses):
        uses[use.name.removeprefix("apex.amp.")].append(use)
    return uses
