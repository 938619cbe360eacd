"""Advice on installing apex, in messages and comments: once the imports have moved, it names ampctx."""

from __future__ import annotations

import re
from collections.abc import Collection

import libcst as cst

from ampctx_apex.migrate.analysis import Parsed, dotted
from ampctx_apex.migrate.report import Edit

_ADVICE = re.compile(
    r"(?P<install>\binstall(?:ing|ed)?\s+)(?:nvidia(?:'s)?[\s-]+)?apex\b"
    r"(?:\s+(?:from|at|via|:)\s+[(<]?(?:git\+)?https?://[^\s\"'<>)]*apex[^\s\"'<>),]*[)>]?)?",
    re.IGNORECASE,
)
_MESSAGES = re.compile(r"print|warn|warning|info|debug|error|exception|critical|log|exit|\w*(Error|Exception|Warning)")


def edits(parsed: Parsed, others: Collection[Edit]) -> list[Edit]:
    """The edits of messages and comments that advise to install apex. ``others``: edits that they must not touch."""
    found = []
    for node in parsed.nodes:
        message = isinstance(node, cst.SimpleString | cst.FormattedStringText) and _is_message(parsed, node)
        if not message and not isinstance(node, cst.Comment):
            continue
        start, _ = parsed.span(node)
        for match in _ADVICE.finditer(parsed.source(node)):
            new = match["install"] + "ampctx"
            found.append(Edit(start + match.start(), start + match.end(), new))
    return [e for e in found if not any(o.start < e.end and e.start < o.end for o in others)]


def _is_message(parsed: Parsed, node: cst.CSTNode) -> bool:
    """Whether a string goes to a reader: it is raised, printed or logged."""
    for parent in parsed.ancestors(node):
        if isinstance(parent, cst.Raise | cst.Assert):
            return True
        if isinstance(parent, cst.Call) and _MESSAGES.fullmatch(dotted(parent.func).rpartition(".")[2]):
            return True
        if isinstance(parent, cst.BaseStatement):
            return False
    return False
