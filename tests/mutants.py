"""Plants one small mutation in each function of four rooms, and has tests look for it: `make test-mutants`.

    python tests/mutants.py [--only PART ...] [--most N] [--seed N] [--jobs N] [--seconds N] [--list] [--measure]

A mutation drops a statement or an operand, turns a condition or comparison round, or reads with ``get`` what ``pop``
takes out. Each lives in a fork of the process that has collected the tests. Those that enter the function run there,
quick ones first, until one fails. --measure writes to build which tests enter which functions. Functions that run in
processes of their own alone, as ranks do, are not tried. The exit status is 1 with a survivor that is not in ``EQUAL``.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ampctx/amp", "ampctx/weights", "ampctx/scaling", "ampctx/optimizers")
TESTS = ("tests/amp", "tests/optimizers", "tests/reliability", "tests/test_grad_clip.py")
MAP = ROOT / "build" / "mutants.json"
# Mutants that change nothing which a program can see, and why.
EQUAL = {
    "ampctx/weights/clip.py:_coefficient: isinstance(max_norm, Tensor) -> False": "moves to an accelerator",
    "ampctx/weights/frames.py:Frames.leave: not is_usual -> True": "makes no plan: slower, with the same bits",
}

TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
TURNED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


class Mutant(NamedTuple):
    tree: ast.AST
    path: str
    function: str
    old: ast.AST
    new: ast.AST

    def __str__(self) -> str:
        return f"{self.path}:{self.function}: {ast.unparse(self.old)} -> {ast.unparse(self.new)}"

    def plant(self) -> None:
        """Gives the functions of the file, as they are in memory, the code of the file with the mutation."""
        file, codes = str(ROOT / self.path), {}
        for node in ast.walk(self.tree):
            for name, value in ast.iter_fields(node):
                if value is self.old:
                    setattr(node, name, self.new)
                elif isinstance(value, list):
                    value[:] = [self.new if one is self.old else one for one in value]
        ast.copy_location(self.new, self.old)
        waiting = [compile(ast.fix_missing_locations(self.tree), file, "exec", dont_inherit=True)]
        while waiting:
            code = waiting.pop()
            codes[code.co_name, code.co_firstlineno] = code
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for function in gc.get_objects():
            if type(function) is FunctionType and (former := function.__code__).co_filename == file:
                code = codes[former.co_name, former.co_firstlineno]
                if code.co_freevars == former.co_freevars:
                    function.__code__ = code


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Below a function, without definitions inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DEFINITIONS):
            yield child
            yield from own_nodes(child)


def changes(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Nodes and what may stand for them."""
    new: list[ast.AST] = []
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        constants = [ast.Constant(False)] if isinstance(node, ast.While) else map(ast.Constant, (False, True))
        return [(node.test, constant) for constant in constants]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = [ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)]
    elif isinstance(node, ast.BoolOp):
        left = [[one for one in node.values if one is not value] for value in node.values]
        new = [values[0] if len(values) == 1 else ast.BoolOp(node.op, values) for values in left]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and node.args:
        new = [ast.Call(ast.Attribute(node.func.value, "get", ast.Load()), node.args, [])]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        new = [ast.Pass()]
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        new = [ast.Pass()] * all(not isinstance(t, ast.Tuple) and getattr(t, "id", "") in {"", *names} for t in targets)
    return [(node, one) for one in new]


def mutants(path: str, seed: int, each: int | None = 1) -> Iterator[Mutant]:
    """``each``: how many of a function, None for all."""
    tree = ast.parse((ROOT / path).read_text())

    def below(node: ast.AST, prefix: str) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{child.name}" if isinstance(child, DEFINITIONS) else ""
            if isinstance(child, ast.FunctionDef):
                nodes = own_nodes(ast.Module(child.body, []))
                found = [Mutant(tree, path, name, *change) for n in nodes for change in changes(n)]
                yield from random.Random(f"{seed} {path} {name}").sample(found, len(found))[:each]
                name += ".<locals>"
            yield from below(child, f"{name}." if name else prefix)

    return below(tree, "")


class Measured:
    """A plugin of pytest: the functions of the rooms that each test enters."""

    def __init__(self) -> None:
        self.entered: dict[str, list[tuple[float, str]]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        codes, begin = set(), time.monotonic()

        def note(frame: Any, event: str, argument: Any) -> None:
            codes.add(frame.f_code)

        threading.settrace(note)
        sys.settrace(note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            for code in codes:
                if (path := code.co_filename.removeprefix(f"{ROOT}/")).startswith(ROOMS):
                    self.entered[f"{path}:{code.co_qualname}"].append((time.monotonic() - begin, item.nodeid))

    def pytest_sessionfinish(self) -> None:
        MAP.parent.mkdir(exist_ok=True)
        MAP.write_text(json.dumps(self.entered))


class Mutated:
    """A plugin of pytest: runs tests in forks, one for each mutant."""

    def __init__(self, found: list[Mutant], options: argparse.Namespace, notes: Path) -> None:
        self.found, self.options, self.notes = found, options, notes
        self.running: dict[int, Mutant | None] = {}
        self.counts: Counter[str] = Counter()
        self.noticed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self.notes / str(os.getpid())).write_text(report.nodeid)
            os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        entered, items = json.loads(MAP.read_text()), {item.nodeid: item for item in session.items}
        for path in {mutant.path for mutant in self.found}:
            importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for mutant in self.found:
            left, chosen = self.options.seconds, []
            for took, test in sorted(entered.get(f"{mutant.path}:{mutant.function}", ())):
                left -= took
                chosen += [items[test]] if test in items and left > 0 else []
            if chosen:
                self.wait(self.options.jobs - 1)
                self.fork(mutant, chosen)
            else:
                self.counts["entered by no test"] += 1
        self.wait(0)
        self.fork(None, [items[test] for test in self.noticed if test in items])
        self.wait(0)
        print(", ".join(f"{n} {word}" for word, n in self.counts.items()))
        return True

    def fork(self, mutant: Mutant | None, items: list[pytest.Item]) -> None:
        if child := os.fork():
            self.running[child] = mutant
            return
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        signal.alarm(60 + 20 * int(self.options.seconds))
        try:
            if mutant is not None:
                mutant.plant()
            for item in items:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            os._exit(0)
        except BaseException as error:
            (self.notes / str(os.getpid())).write_text(repr(error))
        finally:
            os._exit(2)

    def wait(self, most: int) -> None:
        while len(self.running) > most:
            child, status = os.wait()
            mutant, note = self.running.pop(child), self.notes / str(child)
            test = note.read_text() if note.exists() else f"ended by signal {status}"
            if mutant is None and status:
                print(f"{test} fails without a mutant, too")
            elif mutant is not None:
                left = "equal" if str(mutant) in EQUAL else "SURVIVED"
                word = {0: left, 2: "NOT PLANTED"}.get(os.waitstatus_to_exitcode(status), "killed")
                self.counts[word] += 1
                self.noticed.add(test)
                print(f"{word}: {mutant}{f': {test}' if status else ''}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="functions whose file:name contains one of these")
    parser.add_argument("--most", type=int, help="how many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, help="chooses the mutation of each function")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for a mutant, as measured")
    parser.add_argument("--all", action="store_true", help="all mutations of a function, in place of one")
    parser.add_argument("--list", action="store_true", help="names the mutants")
    parser.add_argument("--measure", action="store_true", help="measures which functions tests enter")
    options = parser.parse_args()
    arguments = ["-q", "-s", "-p", "no:cacheprovider", *TESTS]
    if options.measure:
        return int(pytest.main(arguments, plugins=[Measured()]))
    paths = sorted(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).glob("*.py"))
    found = [m for path in paths for m in mutants(path, options.seed, None if options.all else 1)]
    found = [m for m in found if any(part in f"{m.path}:{m.function}" for part in options.only)]
    found = random.Random(options.seed).sample(found, len(found))[: options.most]
    if options.list:
        print(*map(str, found), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as notes:
        run = Mutated(found, options, Path(notes))
        pytest.main(arguments, plugins=[run])
    return 1 if run.counts["SURVIVED"] or not run.counts["killed"] else 0


if __name__ == "__main__":
    sys.exit(main())
