"""Finds apex in a file: imports, uses of their names, imports by string, private attributes.

Names are resolved through libcst's scopes: a local variable called ``amp`` is not the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.install import ROOTS
from ampctx_apex.migrate import report, targets
from ampctx_apex.migrate.report import Finding, Status

# Attributes that apex adds to optimizers.
PRIVATE_ATTRIBUTES = frozenset(
    {
        "_amp_stash",
        "_amp_lazy_init",
        "_lazy_init_maybe_master_weights",
        "_master_params_to_model_params",
        "_post_amp_backward",
        "_prepare_amp_backward",
    }
)
# Files without any of these words are not parsed.
MENTION = re.compile(rb"\b(?:%s)\b" % "|".join([*ROOTS, *sorted(PRIVATE_ATTRIBUTES)]).encode())

_APEX_NAME = re.compile(rf"(?:{'|'.join(ROOTS)})(?:\.\w+)*\Z")
_IMPORTERS = {"import_module", "__import__", "find_spec", "importorskip"}
_ATTRIBUTE_FUNCTIONS = {"getattr", "hasattr", "setattr", "delattr"}
# Statements that make apex names importable.
_COVERS = re.compile(r"import ampctx\.compat\.apex\b|from ampctx\.compat import apex\b|(?:\w+\.)*install_apex\(\)")

Statement = cst.BaseStatement | cst.BaseSmallStatement
Block = cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite


@dataclass(eq=False, repr=False)
class Use:
    """One use of a name imported from apex. ``name``: its full apex name, with all attributes."""

    root: cst.Name
    chain: cst.Name | cst.Attribute
    name: str
    context: meta.ExpressionContext
    call: cst.Call | None
    # Another assignment of the local name also reaches this place.
    uncertain: bool


@dataclass(eq=False, repr=False)
class Binding:
    """A local name bound by an apex import. ``target``: its apex name; "apex" for a plain ``import apex.x``.

    ``alias`` is None for a star import. ``plain``: an import without ``as``, which binds the root package.
    """

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias | None
    local: str
    target: str
    plain: bool
    scope: meta.Scope
    uses: list[Use] = field(default_factory=list)

    @property
    def imported(self) -> str:
        """The name in the import statement."""
        return dotted(self.alias.name) if self.plain and self.alias is not None else self.target


@dataclass(eq=False, repr=False)
class Import:
    """An ``importlib.import_module("apex.amp")`` or the like. ``name`` is None if it is computed."""

    node: cst.BaseExpression
    name: str | None


class Parsed:
    """A file as text and as a tree.

    Raises:
        libcst.ParserSyntaxError: the text is not Python.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        wrapper = meta.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.tree = wrapper.module
        self.scopes = wrapper.resolve(meta.ScopeProvider)
        self.contexts = wrapper.resolve(meta.ExpressionContextProvider)
        self.parents = wrapper.resolve(meta.ParentNodeProvider)
        self._positions = wrapper.resolve(meta.PositionProvider)
        self.starts = report.line_starts(text)
        self.nodes = list(_walk(self.tree))
        self.bindings = list(self._bindings())
        self.imports: list[Import] = []
        self.strings: list[tuple[cst.BaseExpression, str]] = []
        # The packages that the file looks up in sys.modules.
        self.looked_up: set[str] = set()
        self.private: list[tuple[cst.CSTNode, str]] = []
        self._resolve_uses()
        self._read_strings()
        self._read_private()

    # --- places in the text ------------------------------------------------------------------------------------------

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Start and end offset of a node, without surrounding white space."""
        place = self._positions[node]
        start, end = (self.starts[p.line - 1] + p.column for p in (place.start, place.end))
        return start, start + len(self.text[start:end].rstrip())

    def source(self, node: cst.CSTNode) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line)

    def line_start(self, offset: int) -> int:
        return max(start for start in self.starts if start <= offset)

    def line_end(self, offset: int) -> int:
        """The end offset of the line, without its newline."""
        match = re.compile(r"\r\n?|\n|\Z").search(self.text, offset)
        assert match is not None
        return match.start()

    def arguments(self, call: cst.Call | None) -> tuple[str, ...] | None:
        if call is None:
            return None
        plain = (a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in call.args)
        return tuple(self.tree.code_for_node(a).strip() for a in plain)

    def finding(
        self, node: cst.CSTNode, name: str, status: Status, message: str, call: cst.Call | None = None
    ) -> Finding:
        place = self._positions[node].start
        arguments = self.arguments(call)
        return Finding(
            self.path, place.line, place.column + 1, name, arguments, status, message.strip(), report.link(name)
        )

    # --- places in the tree ------------------------------------------------------------------------------------------

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def blocks(self, node: cst.CSTNode) -> list[tuple[Block, int]]:
        """The enclosing blocks, innermost first, each with the index of the statement that holds the node."""
        found: list[tuple[Block, int]] = []
        for parent in self.ancestors(node):
            if isinstance(parent, Block):
                found.append((parent, next(i for i, s in enumerate(parent.body) if s is node)))
            node = parent
        return found

    def function(self, node: cst.CSTNode) -> cst.CSTNode:
        """The enclosing function, lambda or class, else the module."""
        kinds = (cst.FunctionDef, cst.Lambda, cst.ClassDef, cst.Module)
        return next(a for a in self.ancestors(node) if isinstance(a, kinds))

    def assignments(self, name: cst.Name) -> set[meta.BaseAssignment]:
        """All assignments a name may refer to. Empty for non-variables and names from a star import."""
        scope = self.scopes.get(name)
        if scope is None:
            return set()
        found = {a for a in scope[name.value] if not isinstance(a, meta.BuiltinAssignment)}
        if isinstance(scope, meta.ClassScope) and any(a.scope is scope for a in found):
            # Until the class body assigns it, the name refers to the enclosing scope.
            found |= set(scope.parent[name.value])
        return found

    # --- reading -----------------------------------------------------------------------------------------------------

    def _bindings(self) -> Iterator[Binding]:
        for node in self.nodes:
            if isinstance(node, cst.Import):
                for alias in node.names:
                    target = dotted(alias.name)
                    if target.split(".")[0] not in ROOTS:
                        continue
                    plain = alias.asname is None
                    local = target.split(".")[0] if plain else dotted(alias.asname.name)  # type: ignore[union-attr]
                    yield Binding(node, alias, local, local if plain else target, plain, self._scope(node, alias))
            elif isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
                module = dotted(node.module)
                if module.split(".")[0] not in ROOTS:
                    continue
                if isinstance(node.names, cst.ImportStar):
                    yield Binding(node, None, "*", module, False, self._scope(node, None))
                    continue
                for alias in node.names:
                    name = dotted(alias.name)
                    local = name if alias.asname is None else dotted(alias.asname.name)
                    yield Binding(node, alias, local, f"{module}.{name}", False, self._scope(node, alias))

    def _scope(self, statement: cst.CSTNode, alias: cst.ImportAlias | None) -> meta.Scope:
        """The scope an import binds in; a ``global`` statement may change it."""
        scope = self.scopes[statement if alias is None else alias]
        assert scope is not None
        if alias is not None:
            local = (dotted(alias.asname.name) if alias.asname else dotted(alias.name)).split(".")[0]
            for assignment in scope[local]:
                if isinstance(assignment, meta.ImportAssignment) and assignment.node is statement:
                    return assignment.scope
        return scope

    def _resolve_uses(self) -> None:
        by_name = {id(b.alias.asname.name if b.alias.asname else b.alias.name): b for b in self.bindings if b.alias}
        stars = [b for b in self.bindings if b.alias is None]
        for node in self.nodes:
            if not isinstance(node, cst.Name) or self.contexts.get(node) is None or self.scopes.get(node) is None:
                continue
            if self.contexts[node] is meta.ExpressionContext.STORE:
                continue
            assignments = self.assignments(node)
            given = [
                by_name[id(a.as_name)]
                for a in assignments
                if isinstance(a, meta.ImportAssignment) and id(a.as_name) in by_name
            ]
            if not assignments:
                given = [b for b in stars if targets.row(f"{b.target}.{node.value}").is_known]
            for binding in given:
                name = f"{binding.target}.{node.value}" if binding.alias is None else binding.target
                binding.uses.append(self._use(node, name, uncertain=len(given) < len(assignments)))

    def _use(self, root: cst.Name, name: str, uncertain: bool) -> Use:
        chain: cst.Name | cst.Attribute = root
        while isinstance(parent := self.parents[chain], cst.Attribute) and parent.value is chain:
            chain, name = parent, f"{name}.{parent.attr.value}"
        call = parent if isinstance(parent, cst.Call) and parent.func is chain else None
        return Use(root, chain, name, self.contexts[chain], call, uncertain)

    def _read_strings(self) -> None:
        for node in self.nodes:
            if not isinstance(node, cst.SimpleString) or not isinstance(value := node.evaluated_value, str):
                continue
            call = next((a for a in self.ancestors(node) if isinstance(a, cst.Call | cst.BaseStatement)), None)
            importer = isinstance(call, cst.Call) and dotted(call.func).rpartition(".")[2] in _IMPORTERS
            if importer and (_APEX_NAME.match(value) or value.startswith("apex.")):
                assert isinstance(call, cst.Call)
                whole = call.args[0].value is node and _APEX_NAME.match(value)
                self.imports.append(Import(call, value if whole else None))
            elif _APEX_NAME.match(value) and ("." in value or self._is_key_of_modules(node)):
                self.strings.append((node, value))
                if self._is_key_of_modules(node):
                    self.looked_up.add(value.split(".")[0])

    def _is_key_of_modules(self, node: cst.CSTNode) -> bool:
        """Whether the string is a key for ``sys.modules``."""
        for parent in self.ancestors(node):
            if isinstance(parent, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                return False
            if isinstance(parent, cst.Subscript | cst.Comparison | cst.Call):
                return re.search(r"\bsys\.modules\b", self.source(parent)) is not None
        return False

    def _read_private(self) -> None:
        own = {n.name.value for n in self.nodes if isinstance(n, cst.FunctionDef)}
        for node in self.nodes:
            if isinstance(node, cst.Attribute) and node.attr.value in PRIVATE_ATTRIBUTES - own:
                self.private.append((node.attr, node.attr.value))
            elif isinstance(node, cst.Call) and dotted(node.func) in _ATTRIBUTE_FUNCTIONS and len(node.args) > 1:
                key = node.args[1].value
                if isinstance(key, cst.SimpleString) and key.evaluated_value in PRIVATE_ATTRIBUTES - own:
                    self.private.append((key, str(key.evaluated_value)))

    def covering(self) -> list[tuple[Block, int]]:
        """Existing statements that make apex names importable."""
        found = []
        for node in self.nodes:
            if isinstance(node, cst.Import | cst.ImportFrom | cst.Expr) and _COVERS.match(self.source(node)):
                found.append(self.blocks(node)[0])
        return found


def dotted(node: cst.CSTNode) -> str:
    """The dotted form of an attribute chain; parts that are no plain names become ""."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return ""


def _walk(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children))
