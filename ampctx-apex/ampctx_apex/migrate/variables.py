"""Variables and attributes such as ``self.model``, as one function sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst import metadata as meta

from ampctx_apex.migrate.analysis import Parsed, dotted

_FUNCTIONS = (cst.FunctionDef, cst.Lambda)


@dataclass(frozen=True)
class Variable:
    """``scope``: where the first name of ``text`` is assigned. ``owner``: the class, for an attribute of ``self``."""

    text: str
    scope: meta.Scope | None
    owner: cst.ClassDef | None

    def same(self, parsed: Parsed, node: cst.CSTNode) -> bool:
        """Whether a node is this variable."""
        if not isinstance(node, cst.Name | cst.Attribute) or dotted(node) != self.text:
            return False
        if isinstance(node, cst.Name) and parsed.scopes.get(node) is None:
            return False
        if self.owner is not None:
            return related(class_of(parsed, node), self.owner)
        root = _root(node)
        return root is not None and any(a.scope is self.scope for a in parsed.assignments(root))

    def nodes(self, parsed: Parsed) -> list[cst.CSTNode]:
        return [n for n in parsed.nodes if self.same(parsed, n)]


def variable(parsed: Parsed, node: cst.CSTNode | None) -> Variable | None:
    """The variable or attribute that a node names; None for other expressions."""
    root = _root(node) if isinstance(node, cst.Name | cst.Attribute) else None
    if node is None or root is None:
        return None
    if isinstance(node, cst.Attribute) and root.value == "self":
        return Variable(dotted(node), None, class_of(parsed, node))
    scopes = [a.scope for a in parsed.assignments(root)]
    return Variable(dotted(node), scopes[0] if scopes else parsed.scopes[root], None)


def _root(node: cst.CSTNode) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def class_of(parsed: Parsed, node: cst.CSTNode) -> cst.ClassDef | None:
    return next((a for a in parsed.ancestors(node) if isinstance(a, cst.ClassDef)), None)


def related(one: cst.ClassDef | None, other: cst.ClassDef) -> bool:
    """Whether two classes are the same, or one names the other as a base."""
    if one is None or one is other:
        return one is other
    return any(
        dotted(base.value) == parent.name.value
        for child, parent in ((one, other), (other, one))
        for base in child.bases
    )


def function_of(parsed: Parsed, node: cst.CSTNode) -> cst.CSTNode:
    """The enclosing function, else the module. A class is none: its body runs with the module's."""
    kinds = (*_FUNCTIONS, cst.Module)
    return next(a for a in parsed.ancestors(node) if isinstance(a, kinds))


def parameters(function: cst.CSTNode) -> list[str]:
    if not isinstance(function, cst.FunctionDef):
        return []
    given = function.params
    return [p.name.value for p in [*given.posonly_params, *given.params, *given.kwonly_params]]


def call_sites(parsed: Parsed, function: cst.CSTNode) -> Iterator[cst.Call]:
    """Calls of a function or method by its name."""
    if not isinstance(function, cst.FunctionDef):
        return
    owner = class_of(parsed, function)
    for node in parsed.nodes:
        if not isinstance(node, cst.Call):
            continue
        if owner is None and isinstance(node.func, cst.Name) and node.func.value == function.name.value:
            yield node
        method = owner is not None and dotted(node.func) == f"self.{function.name.value}"
        if method and owner is not None and related(class_of(parsed, node), owner):
            yield node


def argument(call: cst.Call, function: cst.CSTNode, name: str) -> cst.BaseExpression | None:
    """The argument that a call gives for a parameter; None if that is not written out."""
    names = [n for n in parameters(function) if n != "self"]
    for i, given in enumerate(call.args):
        if given.star:
            return None
        if (given.keyword.value if given.keyword else names[i] if i < len(names) else "") == name:
            return given.value
    return None
