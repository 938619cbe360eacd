"""Rewrites apex names to ampctx's, by the table in ``ampctx_apex.names``. The code keeps its meaning.

An imported name moves with all its uses, or not at all. It moves by a new import if no use has to change, else each use
gets the full new name. If one use has no public ampctx name, the apex import stays below ``import ampctx_apex.apex``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.migrate import advice, targets
from ampctx_apex.migrate.analysis import Binding, Block, Parsed, Use, dotted
from ampctx_apex.migrate.imports import Choice, Keep, New, Remove, insert_before, rewrite
from ampctx_apex.migrate.report import Edit, Finding, Status
from ampctx_apex.migrate.targets import Row

COVER = "import ampctx_apex.apex"
_COVER_LINE = f"{COVER}  # makes the apex imports below work: keep it above them"
_KEPT = "keeps its apex name; import ampctx_apex.apex makes it importable"


@dataclass
class _Decision:
    """The fate of an imported name. ``written_out``: its uses get the full new name."""

    choice: Choice
    written_out: bool = False
    roots: set[str] = field(default_factory=set)
    # Kept, and needs import ampctx_apex.apex.
    covered: bool = False


def plan(parsed: Parsed, only: str = "", gone: Collection[Binding] = ()) -> tuple[list[Edit], list[Finding]]:
    """The edits and findings of a file.

    ``only``: accept targets of this root package only ("torch"). ``gone``: imports whose uses the caller replaces.
    """
    decisions = _decide_all(parsed, only) | {binding: _Decision(Remove()) for binding in gone}
    edits: list[Edit] = []
    extra: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)
    choices: defaultdict[cst.CSTNode, dict[cst.ImportAlias, Choice]] = defaultdict(dict)
    for binding, decision in decisions.items():
        if binding.alias is not None:
            choices[binding.statement][binding.alias] = decision.choice
        extra[binding.statement] += [
            f"import {root}"
            for root in sorted(decision.roots)
            if not _has_import(parsed, root, binding) and f"import {root}" not in extra[binding.statement]
        ]
        if decision.written_out:
            edits += [_written_out(parsed, use) for use in binding.uses]
    for statement, of_aliases in choices.items():
        assert isinstance(statement, cst.Import | cst.ImportFrom)
        edits += rewrite(parsed, statement, of_aliases, extra[statement])
    # A plain import twice in a file has its uses twice.
    edits = list(dict.fromkeys(edits))
    findings = list(
        dict.fromkeys(f for b, d in decisions.items() if b not in gone for f in _findings(parsed, b, d, only))
    )
    needy: list[cst.CSTNode] = [b.statement for b, d in decisions.items() if d.covered]
    findings += _other_findings(parsed, needy, only)
    if not only:
        edits = _cover(parsed, needy) + edits
        edits += advice.edits(parsed, edits) if edits else []
    return edits, sorted(findings, key=lambda f: (f.line, f.column))


# --- decisions --------------------------------------------------------------------------------------------------------


def _decide_all(parsed: Parsed, only: str) -> dict[Binding, _Decision]:
    groups: defaultdict[tuple[int, str], list[Binding]] = defaultdict(list)
    for binding in parsed.bindings:
        groups[id(binding.scope), binding.local].append(binding)
    decisions: dict[Binding, _Decision] = {}
    for group in groups.values():
        for binding in group:
            decisions[binding] = _decide(parsed, binding, group, only)
    return decisions


def _decide(parsed: Parsed, binding: Binding, group: list[Binding], only: str) -> _Decision:
    own = targets.row(binding.target)
    uses = {use: use for b in group for use in b.uses}.keys() if binding.plain else binding.uses
    rows = {use: targets.row(use.name) for use in uses}
    if binding.target.split(".")[0] in parsed.looked_up:
        return _kept(own, list(rows.values()))
    if binding.plain and not _is_supported(targets.row(binding.imported)):
        return _kept(targets.row(binding.imported), list(rows.values()))
    if binding.alias is None or not all(_moves(parsed, use, row, only) for use, row in rows.items()):
        return _kept(own, list(rows.values()))
    if own.is_module and not rows:
        # Other files may import it from this one, for names that only apex has.
        return _kept(own, [])
    if not own.is_module and not _moves(parsed, None, own, only):
        return _kept(own, [])
    if not binding.plain and (choice := _by_import(binding, own, rows, only)) is not None:
        return _Decision(choice)
    new = [_target(row) for row in rows.values()]
    roots = {target.split(".")[0] for target in new if target}
    alone = all(len({b.target for b in group}) == 1 and not use.uncertain for use in rows)
    if not rows or not all(new) or not alone or not _assigned_only_by(parsed, binding, group) or hidden(parsed, roots):
        return _kept(own, list(rows.values()))
    if binding.plain and "ampctx" in roots:
        module = targets.module_target(binding.imported) or "ampctx"
        return _Decision(New("", module), written_out=True, roots=roots - {"ampctx"})
    return _Decision(Remove(), written_out=True, roots=roots)


def _kept(own: Row, rows: list[Row]) -> _Decision:
    """Keeps the import. It needs ``import ampctx_apex.apex`` unless ampctx supports none of its names."""
    return _Decision(Keep(), covered=any(_is_supported(row) for row in rows or [own]))


def _is_supported(row: Row) -> bool:
    return row.is_known and (row.entry is None or row.entry.is_served)


def _moves(parsed: Parsed, use: Use | None, row: Row, only: str) -> bool:
    """Whether a use has a public name outside apex."""
    if row.entry is None or row.is_module:
        return use is not None and row.is_module and _is_tested(parsed, use)
    target = row.entry.target
    if not row.entry.is_served or target is None or targets.locate(target) is None:
        return False
    if use is not None and use.context is not meta.ExpressionContext.LOAD:
        return False
    root = target.split(".")[0]
    if only and root != only:
        return False
    if root != "torch":
        return True
    # ampctx has apex's signatures, torch has its own.
    if row.entry.status != "supported" or use is None:
        return row.entry.status == "supported"
    return use.call is not None and not row.rest and _fits(target, use.call)


def _fits(target: str, call: cst.Call) -> bool:
    if any(argument.star for argument in call.args):
        return False
    keywords = [argument.keyword.value for argument in call.args if argument.keyword]
    return targets.fits(target, len(call.args) - len(keywords), keywords)


def _is_tested(parsed: Parsed, use: Use) -> bool:
    """``amp is None`` and the like, which only test that the module exists."""
    parent = parsed.parents[use.chain]
    if isinstance(parent, cst.Comparison):
        operators = [c.operator for c in parent.comparisons]
        return parent.left is use.chain and all(isinstance(o, cst.Is | cst.IsNot) for o in operators)
    tested = isinstance(parent, cst.If | cst.IfExp | cst.While | cst.Assert) and parent.test is use.chain
    return tested or isinstance(parent, cst.UnaryOperation)


def _by_import(binding: Binding, own: Row, rows: dict[Use, Row], only: str) -> New | None:
    """A new import under the same local name that needs no change at the uses."""
    if own.is_module:
        target = targets.module_target(binding.target)
        if target is None or (only and target.split(".")[0] != only):
            return None
        for row in rows.values():
            if _target(row) != target + row.name[len(binding.target) :]:
                return None
    else:
        target = _target(own)
        if target.startswith("torch.") and not rows:
            return None
    place = targets.locate(target)
    assert place is not None
    if "." in place.path:
        return None
    if place.path:
        return New(place.module, place.path)
    module, _, name = place.module.rpartition(".")
    return New(module, name) if module or isinstance(binding.statement, cst.Import) else None


def _assigned_only_by(parsed: Parsed, binding: Binding, group: list[Binding]) -> bool:
    statements = {id(b.statement) for b in group}
    return all(isinstance(a, meta.ImportAssignment) and id(a.node) in statements for a in binding.scope[binding.local])


def hidden(parsed: Parsed, roots: set[str]) -> bool:
    """Whether the file uses one of these package names for anything else."""
    for scope in {id(s): s for s in parsed.scopes.values() if s is not None}.values():
        for root in roots:
            for assignment in scope[root]:
                if isinstance(assignment, meta.BuiltinAssignment):
                    continue
                if not isinstance(assignment, meta.ImportAssignment) or not isinstance(assignment.node, cst.Import):
                    return True
                if not any(a.name is assignment.as_name for a in assignment.node.names):
                    return True
    return False


def _has_import(parsed: Parsed, root: str, binding: Binding) -> bool:
    """Whether ``import root`` runs before the names of ``binding`` are used."""
    start = parsed.span(binding.statement)[0]
    for node in parsed.tree.body:
        for small in node.body if isinstance(node, cst.SimpleStatementLine) else []:
            before = parsed.span(small)[0] < start or parsed.function(binding.statement) is not parsed.tree
            if isinstance(small, cst.Import) and before:
                for alias in small.names:
                    if alias.asname is None and dotted(alias.name).split(".")[0] == root:
                        return True
    return False


def _written_out(parsed: Parsed, use: Use) -> Edit:
    row = targets.row(use.name)
    node: cst.BaseExpression = use.chain
    for _ in range(row.rest.count(".")):
        assert isinstance(node, cst.Attribute)
        node = node.value
    return Edit(*parsed.span(node), _target(row))


def _target(row: Row) -> str:
    """The new name, or ""."""
    return (row.entry.target if row.entry is not None else targets.module_target(row.name)) or ""


# --- findings -------------------------------------------------------------------------------------------------------


def _findings(parsed: Parsed, binding: Binding, decision: _Decision, only: str) -> Iterator[Finding]:
    for use in binding.uses:
        row = targets.row(use.name)
        status, message = verdict(row, decision.choice, only)
        yield parsed.finding(use.chain, use.name, status, message, use.call)
    if not binding.uses or (binding.plain and not _is_supported(targets.row(binding.imported))):
        name = f"{binding.target}.*" if binding.alias is None else binding.imported
        status, message = verdict(targets.row(binding.imported), decision.choice, only)
        yield parsed.finding(binding.alias or binding.statement, name, status, message)


def verdict(row: Row, choice: Choice, only: str = "") -> tuple[Status, str]:
    if not row.is_known:
        return "person", f"{row.name}: no apex name that ampctx knows. Check the spelling, or report it"
    note = row.entry.note if row.entry is not None else ""
    if row.entry is not None and not row.entry.is_served:
        return "person", note or "ampctx has no replacement"
    if not isinstance(choice, Keep):
        return ("adapted", note) if row.entry is not None and row.entry.status == "adapted" else ("served", note)
    if only:
        return "person", f"{only} has no drop-in replacement. --to ampctx moves it. {note}"
    return "adapted", f"{_KEPT}. {note}"


def _other_findings(parsed: Parsed, needy: list[cst.CSTNode], only: str) -> Iterator[Finding]:
    """Findings for imports by string and private attributes. Adds statements that need apex names to ``needy``."""
    for found in parsed.imports:
        row = targets.row(found.name) if found.name else None
        if row is None:
            yield parsed.finding(
                found.node, "apex", "person", "imports an apex module by a computed name. Edit it by hand"
            )
        else:
            status, message = verdict(row, Keep(), only)
            yield parsed.finding(found.node, found.name or row.name, status, message)
            if status == "adapted":
                needy.append(found.node)
    imported = {b.target.split(".")[0] for b in parsed.bindings}
    for node, value in parsed.strings:
        if not only and value.split(".")[0] in parsed.looked_up & imported:
            yield parsed.finding(node, value, "adapted", "import ampctx_apex.apex puts it into sys.modules")
            continue
        yield parsed.finding(node, value, "person", "a string that names an apex module. Check how the program uses it")
    for attribute, name in parsed.private:
        if only:
            message = "private apex state; torch.amp has none"
            yield parsed.finding(attribute, name, "person", message)
        else:
            message = "private apex state; import ampctx_apex.apex provides it"
            yield parsed.finding(attribute, name, "adapted", message)


# --- import ampctx_apex.apex ----------------------------------------------------------------------------------------


def _cover(parsed: Parsed, needy: list[cst.CSTNode]) -> list[Edit]:
    """Edits that insert ``import ampctx_apex.apex`` before each of these statements.

    In the same block, not at the top: a guarded import stays guarded.
    """
    covers: list[tuple[Block, int]] = parsed.covering()
    edits = []
    for node in sorted(needy, key=parsed.span):
        blocks = parsed.blocks(node)
        if any(block is other and index >= i for block, index in blocks for other, i in covers):
            continue
        covers.append(blocks[0])
        edits.append(insert_before(parsed, *blocks[0], _COVER_LINE))
    if parsed.private and not any(block is parsed.tree for block, _ in covers):
        index = _head(parsed)
        edits = [insert_before(parsed, parsed.tree, index, f"{COVER}  # adds apex's private attributes to optimizers")]
    return edits


def _head(parsed: Parsed) -> int:
    """The index of the first statement after the docstring and ``from __future__``."""
    for index, statement in enumerate(parsed.tree.body):
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        is_docstring = index == 0 and isinstance(small, cst.Expr) and isinstance(small.value, cst.BaseString)
        is_future = isinstance(small, cst.ImportFrom) and small.module and dotted(small.module) == "__future__"
        if not is_docstring and not is_future:
            return index
    raise AssertionError("a file that uses something has a statement")
