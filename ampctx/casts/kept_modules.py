"""Modules that compute in fp32: ``keep_fp32``, and tables. Finds them, and runs forwards without casts at O1 and O4."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ampctx._errors import AmpValueError
from ampctx.casts.arguments import Undo
from ampctx.casts.autocast import Autocast, ForwardHook
from ampctx.casts.casting import is_statistic


@dataclass(frozen=True)
class KeptModules:
    """The ``keep_fp32`` modules of the models.

    ``modules``: all of them and their children. ``entries``: those that other modules call. Each casts its inputs to
    fp32 and its output to the surrounding dtype. ``described``: the argument in words.
    """

    modules: frozenset[nn.Module]
    entries: tuple[nn.Module, ...]
    described: tuple[str, ...]


def find_kept(models: Sequence[nn.Module], keep_fp32: Sequence[str | type[nn.Module] | nn.Module]) -> KeptModules:
    """Finds the ``keep_fp32`` modules. No host sync.

    Args:
        models: the models to search.
        keep_fp32: patterns for the names of ``named_modules()`` (``"head.*"`` matches ``head`` too), module classes, or
            modules.

    Raises:
        AmpValueError: an entry matches no module, or a parameter or buffer is shared by modules inside and outside.
    """
    # All names of shared modules. torch.compile adds "_orig_mod", which users do not write.
    named = [
        (".".join(part for part in name.split(".") if part != "_orig_mod"), module)
        for model in models
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    matched: set[nn.Module] = set()
    described = []
    for entry in keep_fp32:
        found = {module for name, module in named if _stands_for(entry, name, module)}
        if not found:
            raise AmpValueError(_nothing_found(entry, named))
        matched |= found
        described.append(str(next((name for name, m in named if m is entry), getattr(entry, "__name__", entry))))
    # MultiheadAttention reads the weights of its out_proj and never calls it.
    matched |= {m for _, m in named if isinstance(m, nn.MultiheadAttention) and not matched.isdisjoint(m.children())}

    modules: dict[nn.Module, None] = {}
    outermost: dict[nn.Module, None] = {}
    names_inside: dict[Tensor, str] = {}
    names_outside: dict[Tensor, str] = {}

    def visit(module: nn.Module, prefix: str, inside: bool) -> None:
        if not inside and module in matched:
            outermost[module] = None
            inside = True
        if inside:
            modules[module] = None
        names = names_inside if inside else names_outside
        for name, t in (*module.named_parameters(prefix, False), *module.named_buffers(prefix, False)):
            if t.is_floating_point():
                names.setdefault(t, name)
        for name, child in module.named_children():
            visit(child, f"{prefix}.{name}" if prefix else name, inside)

    # A model inside another one is visited there.
    inner = {m for model in models for m in model.modules() if m is not model}
    for model in [m for m in models if m not in inner] if matched else []:
        visit(model, "", False)
    for t, name in names_inside.items():
        if t in names_outside:
            raise AmpValueError(
                f'keep_fp32 covers "{name}", which is also "{names_outside[t]}" in a module outside keep_fp32. One '
                "tensor cannot have two dtypes. Name both modules, or neither."
            )
    entries = dict.fromkeys(entry for module in outermost for entry in _called(module))
    return KeptModules(frozenset(modules), tuple(entries), tuple(described))


def with_tables(kept: KeptModules, models: Sequence[nn.Module]) -> KeptModules:
    """Adds modules with floating buffers and without parameters, also in their children: 16 bits would round the tables
    of rotary embeddings and schedules. A module without forward computes nothing, and is cast. No host sync.
    """
    found = list[nn.Module]()
    left, seen, wide = list(models), set(kept.modules), (torch.float32, torch.float64)
    while left:
        module = left.pop()
        if module in seen or isinstance(module, ParametrizationList):  # which computes in fp32 already
            continue
        seen.add(module)
        if type(module).forward is nn.Module.forward or any(True for _ in module.parameters()):
            left += module.children()
        elif any(t.dtype in wide and not is_statistic(m, t) for m in module.modules() for t in m.buffers(False)):
            found.append(module)
    modules = kept.modules.union(*(module.modules() for module in found))
    return replace(kept, modules=modules, entries=(*kept.entries, *found))


def _stands_for(entry: str | type[nn.Module] | nn.Module, name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        # "" is the name of the model itself, and more likely a slip.
        return entry != "" and (fnmatchcase(name, entry) or (name != "" and fnmatchcase(name + ".", entry)))
    return isinstance(module, entry) if isinstance(entry, type) else module is entry


def _nothing_found(entry: str | type[nn.Module] | nn.Module, named: Sequence[tuple[str, nn.Module]]) -> str:
    if isinstance(entry, str):
        names = dict.fromkeys(name for name, _ in named if name)
        wanted = entry.rstrip(".*")
        near = difflib.get_close_matches(wanted, names) or [n for n in names if wanted and (wanted in n or n in wanted)]
        return (
            f"keep_fp32: no module of the models has a name that matches {entry!r}. "
            + (f"Similar names: {', '.join(map(repr, near[:3]))}. " if near else "")
            + "Patterns match the names in model.named_modules(), not those of parameters."
        )
    if isinstance(entry, type):
        classes = dict.fromkeys(type(module).__name__ for _, module in named)
        near = difflib.get_close_matches(entry.__name__, classes) or list(classes)[:8]
        return f"keep_fp32: no module of the models is a {entry.__name__}. Their classes include {', '.join(near)}."
    return (
        f"keep_fp32: the {type(entry).__name__} you passed is not a module of the models. Pass one of model.modules()."
    )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """``module``, or its children if it has no forward, like a ModuleList."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _called(child)


# --- O1 and O4 --------------------------------------------------------------------------------------------------------


def install_without_casts(modules: Iterable[nn.Module], autocast: Autocast) -> Undo:
    """Makes forwards of ``modules`` run without the casts of ``autocast``, on fp32 inputs. No host sync."""
    with ExitStack() as stack:
        for module in modules:
            # Runs inside the hooks that an Autocast has around a model's forward; the end always runs.
            begin, end = ForwardHook(autocast, Autocast.begin_uncast), ForwardHook(autocast, Autocast.end_uncast)
            stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end, prepend=True, always_call=True).remove)
        return stack.pop_all().close
