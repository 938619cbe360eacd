"""Moves the apex names of one file to ampctx's, by the table ``ampctx_apex.names``.

An imported name moves with all its uses, or its import stays and comes from ampctx-apex. libcst's scopes tell what a
name refers to: a local variable called ``amp`` is not the module. Uses stay as they are where the new import can have
the old local name; only after ``import apex`` they get the new name.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libcst as cst
from libcst import matchers as m
from libcst import metadata as meta
from libcst.helpers import get_absolute_module_for_import, get_full_name_for_node

from ampctx_apex.migrate.report import Finding, Status
from ampctx_apex.names import NAMES, Name
from ampctx_apex.roots import MODULES

# apex, and its compiled extensions.
ROOTS = {name.partition(".")[0] for name in NAMES} - {"optimizer"}
# Attributes that apex adds to optimizers.
PRIVATE = {name.removeprefix("optimizer.") for name in NAMES if name.startswith("optimizer.")}
# Files without any of these words are not parsed.
MENTION = re.compile(rb"\b(?:%s)\b" % "|".join(sorted(ROOTS | PRIVATE)).encode())
_APEX_NAME = re.compile(rf"(?:{'|'.join(sorted(ROOTS))})\b(?:\.\w+)*")
_IMPORTERS = {"import_module", "__import__", "find_spec", "importorskip"}
_KEPT = "keeps its apex name, which ampctx-apex provides."
_TESTS = m.UnaryOperation() | m.Comparison(comparisons=[m.ComparisonTarget(m.Is() | m.IsNot())])
_ADVICE = re.compile(
    r"(?P<install>\binstall(?:ing|ed)?\s+)(?:nvidia(?:'s)?[\s-]+)?apex\b"
    r"(?:\s+(?:from|at|via|:)\s+[(<]?(?:git\+)?https?://[^\s\"'<>)]*apex[^\s\"'<>),]*[)>]?)?",
    re.IGNORECASE,
)
_SHOWS = m.Name(m.MatchRegex(r"(print|warn|info|debug|critical|log|exit|\w*([Ee]rror|[Ee]xception|[Ww]arning))$"))
_TEXT = m.SimpleString() | m.FormattedStringText()
_MESSAGES = m.Raise() | m.Assert() | m.Call(func=_SHOWS | m.Attribute(attr=_SHOWS))


def is_module(name: str) -> bool:
    path = os.path.join(MODULES, *name.split("."))
    return os.path.isdir(path) or os.path.exists(f"{path}.py")


def row(name: str) -> tuple[str, Name]:
    """The entry of the table for a name, and the name of its row, which may be the start of the name."""
    # apex.__file__ asks about the module.
    prefix = name = re.sub(r"\.__\w+$", "", name)
    while prefix and prefix not in NAMES and not is_module(prefix):
        prefix = prefix.rpartition(".")[0]
    # The names in modules have rows of their own. Attributes of classes, and of refused modules, may have none.
    if not prefix or (prefix != name and is_module(prefix)):
        return name, Name("missing", note="ampctx knows no such name of apex. Check the spelling, or replace it.")
    return prefix, NAMES.get(prefix, Name("supported"))


def moves(name: str, found: Name) -> bool:
    """Whether the name is in ampctx's public API. A module is not: its other names may be apex's alone."""
    return found.is_served and found.target.startswith("ampctx.") and not is_module(name)


class NameUse(NamedTuple):
    """One use of an imported name.

    ``chain``: the name with its attributes, which lead to ``name`` in apex. ``certain``: no other assignment of the
    local name reaches this place. ``tests``: "amp is None" and the like.
    """

    chain: cst.Name | cst.Attribute
    name: str
    call: cst.Call | None
    loads: bool
    certain: bool
    tests: bool


@dataclass(eq=False)
class Binding:
    """A local name that an import binds to apex's ``target``. ``alias`` is None for a star.

    ``plain``: an import without ``as``. It binds the root of ``imported``, the others bind all of it.
    """

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias | None
    imported: str
    target: str
    plain: bool
    scope: Any
    uses: list[NameUse] = field(default_factory=list)


class Source:
    """A parsed file, and where it has apex's names."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        wrapper = meta.MetadataWrapper(cst.parse_module(data), unsafe_skip_copy=True)
        self.tree = wrapper.module
        self.parents = wrapper.resolve(meta.ParentNodeProvider)
        self.nodes = list(self.parents)
        self.scopes = wrapper.resolve(meta.ScopeProvider)
        self._contexts = wrapper.resolve(meta.ExpressionContextProvider)
        self._positions = wrapper.resolve(meta.PositionProvider)
        self.bindings = [b for n in self.nodes if isinstance(n, cst.Import | cst.ImportFrom) for b in self._bindings(n)]
        self._read_uses()
        self.strings = list(self._read_strings())
        self.looked_up = {name.partition(".")[0] for _, name, is_key in self.strings if is_key}
        private = PRIVATE - {n.name.value for n in self.nodes if isinstance(n, cst.FunctionDef)}
        attribute = m.Attribute(attr=m.Name(m.MatchIfTrue(private.__contains__)))
        string = m.SimpleString(m.MatchIfTrue(lambda code: code[1:-1] in private))
        self.private = m.findall(self.tree, attribute | string)

    def finding(self, node: cst.CSTNode, name: str, told: tuple[Status, str], call: cst.Call | None = None) -> Finding:
        place, code = self._positions[node].start, self.tree.code_for_node
        plain = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in call.args] if call else []
        arguments = tuple(code(a).strip() for a in plain) if call else None
        return Finding(self.path, place.line, place.column + 1, name, arguments, *told)

    def _bindings(self, node: cst.Import | cst.ImportFrom) -> Iterator[Binding]:
        module = f"{get_absolute_module_for_import(None, node)}." if isinstance(node, cst.ImportFrom) else ""
        if isinstance(node.names, cst.ImportStar):
            if module.partition(".")[0] in ROOTS:
                yield Binding(node, None, f"{module}*", module[:-1], False, None)
            return
        for alias in node.names:
            name = module + alias.evaluated_name
            if name.partition(".")[0] not in ROOTS:
                continue
            plain = not module and alias.asname is None
            target = name.split(".")[0] if plain else name
            local = target if plain else alias.evaluated_alias or alias.evaluated_name
            # A global statement may lead to another scope than that of the statement.
            scope: Any = self.scopes[alias]
            scopes = [a.scope for a in scope[local] if isinstance(a, meta.ImportAssignment) and a.node is node]
            yield Binding(node, alias, name, target, plain, next(iter(scopes), scope))

    def _read_uses(self) -> None:
        names = {b.alias.asname.name if b.alias.asname else b.alias.name: b for b in self.bindings if b.alias}
        for node in self.nodes:
            context, scope = self._contexts.get(node), self.scopes.get(node)
            if not isinstance(node, cst.Name) or scope is None or context in (None, meta.ExpressionContext.STORE):
                continue
            assignments = set(scope[node.value])
            if isinstance(scope, meta.ClassScope) and any(a.scope is scope for a in assignments):
                # Until the class body assigns it, the name refers to the enclosing scope.
                assignments |= set(scope.parent[node.value])
            given = [names[place] for a in assignments if (place := getattr(a, "as_name", None)) in names]
            for binding in given:
                binding.uses.append(self._use(node, binding.target, len(given) == len(assignments)))

    def _use(self, root: cst.Name, name: str, certain: bool) -> NameUse:
        chain: cst.Name | cst.Attribute = root
        while isinstance(parent := self.parents[chain], cst.Attribute) and parent.value is chain:
            chain, name = parent, f"{name}.{parent.attr.value}"
        call = parent if isinstance(parent, cst.Call) and parent.func is chain else None
        tests = getattr(parent, "test", None) is chain or m.matches(parent, _TESTS)
        return NameUse(chain, name, call, self._contexts[chain] is meta.ExpressionContext.LOAD, certain, tests)

    def _read_strings(self) -> Iterator[tuple[cst.CSTNode, str, bool]]:
        """Strings with apex modules, or calls that import one (a computed name is ""). True: a key of sys.modules."""
        for node in self.nodes:
            name = node.evaluated_value if isinstance(node, cst.SimpleString) else None
            if not isinstance(name, str) or not _APEX_NAME.match(name):
                continue
            around = self.parents[node]
            while not isinstance(around, cst.Call | cst.Subscript | cst.Comparison | cst.BaseStatement):
                around = self.parents[around]
            whole = _APEX_NAME.fullmatch(name) is not None
            function = get_full_name_for_node(around.func) if isinstance(around, cst.Call) else None
            if isinstance(around, cst.Call) and (function or "").rpartition(".")[2] in _IMPORTERS:
                yield around, name if whole and around.args[0].value is node else "", False
            elif whole:
                code = "" if isinstance(around, cst.BaseStatement) else self.tree.code_for_node(around)
                if "." in name or "sys.modules" in code:
                    yield node, name, "sys.modules" in code


def rewritten(path: str, data: bytes) -> tuple[bytes, list[Finding]]:
    """The new text of a file, and a finding for each use of an apex name. Raises what ``parse_module`` raises."""
    source = Source(path, data)
    if source.tree.bytes != data:
        raise SyntaxError("libcst does not keep the layout of this file. Edit it by hand")
    findings = list(_other_findings(source))
    new: dict[cst.CSTNode, Any] = {}
    moved: defaultdict[cst.Import | cst.ImportFrom, dict[cst.ImportAlias, str]] = defaultdict(dict)
    for binding in source.bindings:
        name = _new_name(source, binding)
        if name and binding.alias is not None:
            moved[binding.statement][binding.alias] = name
        for use in binding.uses:
            known, found = row(use.name)
            findings.append(source.finding(use.chain, use.name, _status_of(found, bool(name)), use.call))
            if name and binding.plain:
                whole = cst.parse_expression(found.target + use.name.removeprefix(known))
                new[use.chain] = whole.with_changes(lpar=use.chain.lpar, rpar=use.chain.rpar)
        own = _status_of(row(binding.imported.removesuffix(".*"))[1], bool(name))
        if not binding.uses or (binding.plain and own[0] == "manual"):
            findings.append(source.finding(binding.alias or binding.statement, binding.imported, own))
    findings = sorted(dict.fromkeys(findings), key=lambda f: (f.line, f.column))
    if not moved:
        return data, findings
    for statement, names in moved.items():
        new |= _new_import(source, statement, names)
    # Advice on installing apex, in comments and in strings that are raised, printed or logged.
    told: list[Any] = [n for shown in m.findall(source.tree, _MESSAGES) for n in m.findall(shown, _TEXT)]
    package = "ampctx" if sum(map(len, moved.values())) == len(source.bindings) else "ampctx-apex"
    for text in [*m.findall(source.tree, m.Comment()), *told]:
        new[text] = text.with_changes(value=_ADVICE.sub(rf"\g<install>{package}", text.value))
    return source.tree.visit(_Replace(new)).bytes, findings


def _new_name(source: Source, binding: Binding) -> str:
    """The name to import in place of an apex name, or "" if its import stays."""
    root = binding.target.partition(".")[0]
    # The import provides what is looked up in sys.modules, and apex's attributes of optimizers.
    if binding.alias is None or root in source.looked_up or (source.private and root == "apex"):
        return ""
    if binding.plain:
        group = [b for b in source.bindings if b.plain and b.target == root and b.scope is binding.scope]
        alone = {a.node for a in binding.scope[root]} <= {b.statement for b in group}
        uses = [(use, *row(use.name)) for b in group for use in b.uses]
        alone &= all(use.certain and use.loads and moves(known, found) for use, known, found in uses)
        others = (a for scope in source.scopes.values() if scope is not None for a in scope["ampctx"])
        free = all(isinstance(getattr(a, "node", None), cst.Import) for a in others)
        if not (uses and alone and free and all(row(b.imported)[1].is_served for b in group)):
            return ""
        module = f"ampctx{binding.imported.removeprefix(root)}"
        return module if any(found.target.startswith(f"{module}.") for _, _, found in uses) else "ampctx"
    if not all(use.loads for use in binding.uses):
        return ""
    names = set()
    used = [use.name for use in binding.uses if not (use.tests and is_module(use.name))]
    for known, found in map(row, used or [binding.target]):
        # amp.initialize is ampctx.amp.initialize: so amp is ampctx.amp.
        attributes = known.removeprefix(binding.target)
        fits = moves(known, found) and found.target.endswith(attributes)
        names.add(found.target.removesuffix(attributes) if fits else "")
    new = names.pop() if len(names) == 1 else ""
    return new if isinstance(binding.statement, cst.Import) or "." in new else ""


def _status_of(found: Name, moved: bool) -> tuple[Status, str]:
    if not found.is_served:
        return "manual", found.note
    if not moved:
        return "adapted", f"{_KEPT} {found.note}".strip()
    return ("adapted" if found.status == "adapted" else "moved"), found.note


def _other_findings(source: Source) -> Iterator[Finding]:
    imported = {b.target.split(".")[0] for b in source.bindings}
    for node, name, is_key in source.strings:
        told: tuple[Status, str] = "manual", "A string names an apex module. Check how the program uses it."
        if not name:
            told = "manual", "The program computes the name of this import. Edit it by hand."
        elif isinstance(node, cst.Call):
            told = _status_of(row(name)[1], False)
        elif is_key and name.partition(".")[0] in imported:
            told = "adapted", f"The import {_KEPT}"
        yield source.finding(node, name or "apex", told)
    for node in source.private:
        told = "manual", "Private apex state. Write 'import apex.amp' above: ampctx-apex provides it."
        if "apex" in imported:
            told = "adapted", "Private apex state, from ampctx-apex. The apex imports of this file stay."
        yield source.finding(node, source.tree.code_for_node(node), told)


class _Replace(cst.CSTTransformer):
    """Puts other nodes into a tree."""

    def __init__(self, new: dict[cst.CSTNode, Any]) -> None:
        super().__init__()
        self.new = new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        return self.new.get(original_node, updated_node)


def _new_import(
    source: Source, statement: cst.Import | cst.ImportFrom, new: dict[cst.ImportAlias, str]
) -> dict[cst.CSTNode, Any]:
    """Replacements for an import statement some of whose names move."""
    if isinstance(statement, cst.Import):
        return {alias: alias.with_changes(name=cst.parse_expression(name)) for alias, name in new.items()}
    assert statement.module is not None
    assert not isinstance(statement.names, cst.ImportStar)
    code = source.tree.code_for_node
    modules: defaultdict[str, list[cst.ImportAlias]] = defaultdict(list)
    for alias in statement.names:
        module, _, name = new.get(alias, "").rpartition(".")
        local = alias.evaluated_alias or alias.evaluated_name
        if name:
            asname = None if name == local else alias.asname or cst.AsName(cst.Name(local))
            alias = alias.with_changes(name=cst.Name(name), asname=asname)
        modules[module].append(alias)
    # The statement takes the module of most of its names. Those of others get a statement of their own.
    main = max(modules, key=lambda module: (len(modules[module]), not module))
    *first, last = modules.pop(main)
    if modules and (statement.lpar is None or "\n" not in code(last)):
        last = last.with_changes(comma=cst.MaybeSentinel.DEFAULT)
    place = cst.parse_expression(main) if main else statement.module
    stays = statement.with_changes(module=place, names=[*first, last])
    if not modules:
        return {statement: stays}
    line, lines = source.parents[statement], []
    for module, aliases in modules.items():
        names = [code(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for alias in aliases]
        comments = [f"  {code(comment)}" for alias in aliases for comment in m.findall(alias, m.Comment())]
        text = f"from {module or get_full_name_for_node(statement.module)} import {', '.join(names)}{''.join(comments)}"
        lines.append(cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine))
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        return {line: cst.FlattenSentinel([line.with_changes(body=[stays]), *lines])}
    return {statement: cst.FlattenSentinel([stays, *(line.body[0] for line in lines)])}
