"""Edits of import statements: change modules and names, split lists, add lines."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import libcst as cst

from ampctx_apex.migrate.analysis import Block, Parsed
from ampctx_apex.migrate.report import Edit


@dataclass(frozen=True)
class Keep:
    """Keep the import."""


@dataclass(frozen=True)
class Remove:
    """Remove the import."""


@dataclass(frozen=True)
class New:
    """Import ``name`` from ``module`` under the same local name; ``import name`` if ``module`` is empty."""

    module: str
    name: str


Choice = Keep | Remove | New


def rewrite(
    parsed: Parsed,
    statement: cst.Import | cst.ImportFrom,
    choices: dict[cst.ImportAlias, Choice],
    extra: list[str],
) -> list[Edit]:
    """Edits of one import statement. ``extra``: statements to add after it. Keeps comments, unless the whole statement
    is removed."""
    assert not isinstance(statement.names, cst.ImportStar)
    aliases = list(statement.names)
    if all(isinstance(c, Keep) for c in choices.values()) and not extra:
        return []
    if all(isinstance(choices.get(a), Remove) for a in aliases):
        return [_replace_whole(parsed, statement, extra)]
    if isinstance(statement, cst.Import):
        edits, added = _edit_import(parsed, aliases, choices)
    else:
        edits, added = _edit_from(parsed, statement, aliases, choices)
    return [*edits, *_append(parsed, statement, [*added, *extra])]


def _edit_import(
    parsed: Parsed, aliases: list[cst.ImportAlias], choices: dict[cst.ImportAlias, Choice]
) -> tuple[list[Edit], list[str]]:
    edits = []
    gone = [a for a in aliases if isinstance(choices.get(a), Remove)]
    for alias in aliases:
        choice = choices.get(alias)
        if isinstance(choice, New):
            full = f"{choice.module}.{choice.name}".strip(".")
            edits.append(Edit(*parsed.span(alias.name), full))
    removed, comments = _without(parsed, aliases, gone)
    return edits + removed, [c for c in comments.values() if c]


def _edit_from(
    parsed: Parsed, statement: cst.ImportFrom, aliases: list[cst.ImportAlias], choices: dict[cst.ImportAlias, Choice]
) -> tuple[list[Edit], list[str]]:
    # The statement takes the module of most of its names. The other names get statements of their own.
    modules = {a: c.module for a in aliases if isinstance(c := choices.get(a, Keep()), New)}
    destinations: dict[cst.ImportAlias, str | None] = {
        a: modules.get(a) for a in aliases if not isinstance(choices.get(a), Remove)
    }
    counts = Counter(destinations.values())
    main = max(counts, key=lambda destination: (counts[destination], destination is None))
    leaving = [a for a in aliases if a not in destinations or destinations[a] != main]
    removed, comments = _without(parsed, aliases, leaving)
    edits, added = removed, []
    if main is not None:
        assert statement.module is not None
        edits.append(Edit(*parsed.span(statement.module), main))
    for alias in aliases:
        choice = choices.get(alias, Keep())
        old, local = _names(alias)
        new = choice.name if isinstance(choice, New) else old
        text = new if new == local else f"{new} as {local}"
        if alias in leaving:
            if not isinstance(choice, Remove):
                assert statement.module is not None
                module = destinations[alias] or parsed.source(statement.module)
                added.append(f"from {module} import {text}{comments[alias]}")
        elif new != old:
            edits.append(Edit(*parsed.span(alias), text))
    return edits, added


def _names(alias: cst.ImportAlias) -> tuple[str, str]:
    """The imported name and its local name."""
    assert isinstance(alias.name, cst.Name)
    local = alias.asname.name if alias.asname is not None else alias.name
    assert isinstance(local, cst.Name)
    return alias.name.value, local.value


def _without(
    parsed: Parsed, aliases: list[cst.ImportAlias], gone: list[cst.ImportAlias]
) -> tuple[list[Edit], dict[cst.ImportAlias, str]]:
    """Edits that remove some aliases of a list, and the comments removed with each."""
    spans = {a: parsed.span(a) for a in aliases}
    edits: list[Edit] = []
    comments: dict[cst.ImportAlias, str] = {}
    for i, alias in enumerate(aliases):
        if alias not in gone:
            continue
        start, end = spans[alias]
        line, line_end = parsed.line_start(start), parsed.line_end(end)
        after = re.fullmatch(r"[ \t]*,?[ \t]*(#.*)?", parsed.text[end:line_end])
        if parsed.text[line:start].isspace() and after and parsed.text[line - 2 : line - 1] != "\\":
            next_line = re.compile(r"\r\n?|\n").match(parsed.text, line_end)
            assert next_line is not None, "a list over several lines ends in a parenthesis"
            start, end = line, next_line.end()
        elif any(a not in gone for a in aliases[i + 1 :]):
            end = spans[aliases[i + 1]][0]
        else:
            last = max(j for j in range(i) if aliases[j] not in gone)
            start = max(spans[aliases[last]][1], edits[-1].end if edits else 0)
        taken = re.findall(r"#.*", parsed.text[start:end].replace("\r", ""))
        comments[alias] = "".join(f"  {c}" for c in taken)
        edits.append(Edit(start, end, ""))
    return edits, comments


def _append(parsed: Parsed, statement: cst.CSTNode, added: list[str]) -> list[Edit]:
    if not added:
        return []
    line = parsed.parents[statement]
    end = parsed.span(statement)[1]
    assert isinstance(line, cst.SimpleStatementLine | cst.SimpleStatementSuite)
    if isinstance(line, cst.SimpleStatementSuite) or len(line.body) > 1:
        return [Edit(end, end, "".join("; " + re.sub(r"\s*#.*", "", text) for text in added))]
    indent, newline = indent_of(parsed, statement), parsed.tree.default_newline
    end = parsed.line_end(end)
    return [Edit(end, end, "".join(f"{newline}{indent}{text}" for text in added))]


def _replace_whole(parsed: Parsed, statement: cst.CSTNode, extra: list[str]) -> Edit:
    """Replaces a statement by ``extra``, by ``pass`` if the block would be empty, or by nothing."""
    start, end = parsed.span(statement)
    line = parsed.parents[statement]
    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    if extra:
        newline = parsed.tree.default_newline + indent_of(parsed, statement) if alone else "; "
        return Edit(start, end, newline.join(extra))
    block = parsed.parents[line] if alone else line
    assert isinstance(block, Block | cst.SimpleStatementLine)
    if not alone or (len(block.body) == 1 and not isinstance(block, cst.Module)):
        return Edit(start, end, "pass")
    line_end = parsed.line_end(end)
    newline_match = re.compile(r"\r\n?|\n").match(parsed.text, line_end)
    return Edit(parsed.line_start(start), newline_match.end() if newline_match else line_end, "")


def indent_of(parsed: Parsed, node: cst.CSTNode) -> str:
    """The indentation of a node's line."""
    start = parsed.line_start(parsed.span(node)[0])
    match = re.compile(r"[ \t\f]*").match(parsed.text, start)
    assert match is not None
    return match.group()


def insert_before(parsed: Parsed, block: Block, index: int, text: str) -> Edit:
    """Inserts a line before a statement; in a one-line block, a statement without the comment."""
    if not block.body:
        return Edit(len(parsed.text), len(parsed.text), text + parsed.tree.default_newline)
    statement = block.body[index]
    start = parsed.span(statement)[0]
    if isinstance(block, cst.SimpleStatementSuite):
        return Edit(start, start, text.partition("  #")[0] + "; ")
    line = parsed.line_start(start)
    return Edit(line, line, indent_of(parsed, statement) + text + parsed.tree.default_newline)
