"""Raises at chosen places in the library: at a line that runs, at a call of one of its kernels, at a write."""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # see host_reads.py
from torch.utils._pytree import tree_leaves

import ampctx
from ampctx import AmpError
from ampctx.kernels import ops
from ampctx.kernels.plan import Plan

PACKAGE = str(Path(ampctx.__file__).parent)

Place = tuple[str, int, int]  # file, line, how often the line ran before

KERNELS = (
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_scale_clipped",
    "multi_tensor_unscale_l2norm",
    "unscale_l2norm_and_update",
    "update_scale",
)


class Fault(BaseException):
    """What is raised: no Exception, so that nothing handles it by chance, like KeyboardInterrupt."""


@contextmanager
def _lines(on_line: Callable[[Place], None]) -> Iterator[None]:
    """Tells of every line of the package that this thread is about to run."""
    ran: dict[tuple[str, int], int] = {}

    def local(frame, event, argument):
        if event == "line":
            at = frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_lineno
            ran[at] = ran.get(at, -1) + 1
            on_line((*at, ran[at]))
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)


def lines_of(work: Callable[[], None]) -> list[Place]:
    """The lines that ``work`` runs: each at its first and at its last time."""
    places: list[Place] = []
    with _lines(places.append):
        work()
    last = {place[:2]: place for place in places}
    return [p for p in places if (p[2] == 0 or last[p[:2]] == p) and not _between(p)]


def _between(place: Place) -> bool:
    """Where Python raises nothing by itself, or where nothing could be cleaned up by any code: at ``try:``, at a
    ``with`` that it comes back to before ``__exit__``, and at the first line of a ``finally``."""
    at = linecache.getline(str(Path(PACKAGE, place[0])), place[1]).strip()
    above = linecache.getline(str(Path(PACKAGE, place[0])), place[1] - 1).strip()
    return at == "try:" or above == "finally:" or (at.startswith("with ") and place[2] > 0)


@contextmanager
def fault_at_line(place: Place) -> Iterator[None]:
    def on_line(now: Place) -> None:
        if now == place:
            raise Fault(f"at {place}")

    # No signal comes between a ``finally`` and its first call, where this may raise, and leave gradients off.
    with torch.set_grad_enabled(True), _lines(on_line):
        yield


@contextmanager
def kernel_calls(on_call: Callable[[int, str], None]) -> Iterator[None]:
    """Calls ``on_call(number, kernel)`` before each kernel or plan runs: ``number`` counts up from 1."""
    count = 0
    originals = {name: getattr(ops, name) for name in KERNELS}

    def counted(name):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            on_call(count, name)
            return originals[name](*args, **kwargs)

        return call

    for name in KERNELS:
        setattr(ops, name, counted(name))
    originals["run"] = Plan.run
    Plan.run = counted("run")
    try:
        yield
    finally:
        Plan.run = originals.pop("run")
        for name, original in originals.items():
            setattr(ops, name, original)


def out_of_memory_at(number: int):
    """The kernel call of that number raises, of those in the context."""

    def on_call(now: int, name: str) -> None:
        if now == number:
            raise torch.OutOfMemoryError(name)

    return kernel_calls(on_call)


class WritesFail(TorchDispatchMode):
    """An op that would write to one of ``tensors`` runs out of memory before it does. ``times``: the first of them, by
    default each; ``count`` of them have."""

    def __init__(self, tensors, times=None):
        super().__init__()
        self.memory, self.times, self.count = {t.data_ptr() for t in tensors}, times, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)] if written else ()
            if self.count != self.times and any(t.data_ptr() in self.memory for t in tensors):
                self.count += 1
                raise torch.OutOfMemoryError(func.name())
        return func(*args, **(kwargs or {}))


def refusal(call, *arguments) -> str:
    """The message of the AmpError that the call raises, "" where it raises none."""
    try:
        call(*arguments)
    except AmpError as error:
        return str(error)
    return ""
