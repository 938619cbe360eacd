"""``amp.explain``: the dtypes of every op in a forward, its casts, and products that cannot use tensor cores.

A ``TorchDispatchMode`` records the ops that reach torch's kernels, after autocast. A ``TorchFunctionMode`` would see
the user's calls, before the casts.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# torch's notes on extending PyTorch import it from this private module. A test guards it.
from torch.utils._python_dispatch import TorchDispatchMode

from ampctx._errors import AmpError, AmpTypeError
from ampctx.casts.arguments import LOW_PRECISION

# Ops that compute nothing, besides those that return views.
_BOOKKEEPING = frozenset({"empty_like", "new_empty", "new_empty_strided", "unsafe_view"})
# Ops for tensor cores: matrix products (of their last two tensors), convolutions, attention, recurrent layers.
_MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul"})
_CONVOLUTIONS = frozenset({"convolution", "convolution_overrideable"})
_ATTENTION = "scaled_dot_product"
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "cudnn_rnn"})
_PRODUCTS = _MATRIX_PRODUCTS | _CONVOLUTIONS | _RECURRENT | {"mv", "addmv", "mkldnn_linear"}
# The number of places that a hint names.
_NAMED = 3


class OpCount(NamedTuple):
    """A row of the table: ``calls`` of ``op`` had operands of ``dtype``, such as "float16" or "float16+float32"."""

    op: str
    dtype: str
    calls: int


class CastCount(NamedTuple):
    """Casts from one floating dtype to another. ``bytes``: bytes read plus bytes written."""

    source: str
    target: str
    calls: int
    bytes: int


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of ``amp.explain``. ``print`` shows it as a table; programs use the fields.

    Attributes:
        rows: the calls of each op in each dtype, in the order of the first call.
        casts: the casts, the most bytes first.
        hints: sentences on possible costs of speed; empty if there are none.
    """

    rows: list[OpCount]
    casts: list[CastCount]
    hints: list[str]

    @property
    def cast_count(self) -> int:
        """The number of casts."""
        return sum(cast.calls for cast in self.casts)

    @property
    def cast_bytes(self) -> int:
        """The bytes that the casts read and wrote."""
        return sum(cast.bytes for cast in self.casts)

    def calls(self, op: str, dtype: str | None = None) -> int:
        """Counts the calls of ``op``, in ``dtype`` or in any."""
        return sum(row.calls for row in self.rows if row.op == op and dtype in (None, row.dtype))

    def __str__(self) -> str:
        dtypes = sorted({row.dtype for row in self.rows}, key=lambda d: (d.count("+"), d))
        ops = dict.fromkeys(row.op for row in self.rows)
        lines = _table(["op", *dtypes], [[op, *(self.calls(op, d) or "." for d in dtypes)] for op in ops])
        casts = [[f"{c.source} -> {c.target}", c.calls, f"{c.bytes:,}"] for c in self.casts]
        if len(casts) > 1:
            casts.append(["all", self.cast_count, f"{self.cast_bytes:,}"])
        lines += ["", *(_table(["cast", "calls", "bytes"], casts) if casts else ["no casts"])]
        if self.hints:
            lines += ["", "hints", *(f"- {hint}" for hint in self.hints)]
        return "\n".join(lines)

    __repr__ = __str__  # interactive sessions show the repr


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in cells]


def explain(model: nn.Module, /, *args: Any, **kwargs: Any) -> Explanation:
    """Runs ``model(*args, **kwargs)`` once and returns the dtypes of its ops. Print the result.

    The forward runs with the current settings: opt level, train or eval mode, and any ``torch.autocast``,
    ``torch.no_grad`` or ``amp.disable_casts`` block around the call. There is no backward; its ops would use the dtypes
    of the forward. Compiled code runs op by op. One rank may call it alone: DistributedDataParallel and DataParallel
    are bypassed.

    Nothing changes, even if the forward raises: ``explain`` restores weights, buffers, gradients, tensor arguments,
    random number generators (torch, Python, NumPy) and attributes of the modules. It empties autocast's weight cache.

    Args:
        model: any module, with or without ``amp.initialize``. To include the loss, pass a module that computes it.
        *args, **kwargs: the arguments of the model: tensors of any dtype and shape, or other objects.

    Returns:
        An ``Explanation``: ops with floating or complex arguments under the names of torch's kernels (``addmm`` for a
        linear layer), without views; casts; and hints on 16-bit products with dimensions that are no multiples of 8,
        weights cast more than once, products in fp32, ops in fp64.

    Raises:
        AmpTypeError: ``model`` is no module.
        AmpError: a lazy parameter has no values before the first forward.

    Host syncs: those of the forward, and of saving the generators.
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(
            f"explain: model must be a torch.nn.Module, got {type(model).__name__}. To explain a function, such as a "
            "loss, call it in the forward of a module."
        )
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    lazy = next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise AmpError(f"explain: {lazy} of the model is not initialized yet: run one forward first.")
    recorder = _Recorder()
    # A mode does not see compiled code, and torch never compiles code again that it first met under a mode.
    with torch.compiler.set_stance("force_eager"), _restored(model, (args, kwargs), recorder), recorder:
        model(*args, **kwargs)
    return recorder.explanation()


@contextmanager
def _restored(model: nn.Module, batch: Any, recorder: _Recorder) -> Iterator[None]:
    """Undoes all that a forward changes, the last line first, also if it raises."""
    modules, parameters = list(model.modules()), list(model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    tensors = (*parameters, *grads, *model.buffers(), *_tensors(batch))
    accelerator = torch.accelerator.current_accelerator()
    kind = None if accelerator is None else accelerator.type
    devices = {t.device.index for t in tensors if t.device.type == kind}
    # If there is an instance, its module has been imported.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    # With hooks these would not take their fast path.
    fused = {m for f in modules if isinstance(f, nn.TransformerEncoderLayer) and not f.training for m in f.modules()}
    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        undo.enter_context(torch.random.fork_rng(devices, device_type=kind))
        for module in modules:
            for name, value in (("", vars(module)), *vars(module).items()):
                # Not _parameters: the code that shards them replaces entries.
                if isinstance(value, (list, dict, set)) and name != "_parameters":
                    undo.callback(_refill, value, dict(value) if isinstance(value, dict) else list(value))
        for p in parameters:
            undo.callback(_set_grad, p, p.grad)
        for t in tensors:
            if (storage := _storage(t)) is not None:
                recorder.watched[storage.data_ptr()] = storage
                undo.callback(_reshape, t, t.requires_grad, t.shape, t.stride(), t.storage_offset())
        undo.callback(recorder.write_back)
        for unit in modules:
            if isinstance(unit, sharded):
                undo.callback(_reshard, unit, list(unit.parameters()))
        # Kernels write running statistics without saying so in the op's schema. Restored values would count as a write,
        # and a graph that holds the statistics would refuse its backward. So the forward runs on copies of the buffers.
        copies = {b: b.detach().clone() for b in model.buffers()}
        for module in modules:
            for name, b in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                undo.callback(setattr, module, name, b)
                setattr(module, name, copies[b])
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if (storage := _storage(t)) is not None:
                recorder.weights.setdefault(storage.data_ptr(), name)
        for name, module in model.named_modules():
            if module not in fused and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                undo.callback(module.register_forward_pre_hook(partial(recorder.enter, name), prepend=True).remove)
                undo.callback(module.register_forward_hook(partial(recorder.leave, name), always_call=True).remove)
        # Earlier casts would be missing in the count, and casts of copies must not stay.
        undo.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        yield


def _refill(value: Any, content: Any) -> None:
    # Leave unchanged ones alone: some subclasses cannot be written to.
    if _ids(value) != _ids(content):
        value.clear()
        value.extend(content) if isinstance(value, list) else value.update(content)


def _ids(value: Any) -> list[int]:
    return [id(v) for v in (*value, *(value.values() if isinstance(value, dict) else ()))]


def _set_grad(p: Tensor, grad: Tensor | None) -> None:
    if p.grad is not grad:
        p.grad = grad


def _reshape(t: Tensor, requires_grad: bool, *layout: Any) -> None:
    if (t.shape, t.stride(), t.storage_offset()) != layout:
        with torch.no_grad():
            t.as_strided_(*layout)
    if t.is_leaf and t.requires_grad != requires_grad:
        t.requires_grad_(requires_grad)


def _reshard(unit: Any, parameters: list[Tensor]) -> None:
    # Without a backward units stay unsharded, and are stale after a step.
    if _ids(unit.parameters()) != _ids(parameters):
        unit.reshard()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for part in value for t in _tensors(part)]


def _storage(t: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor. None for tensor wrappers and for nested, sparse or empty tensors."""
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ or t.is_nested or t.layout is not torch.strided:
        return None
    storage = t.untyped_storage()
    return storage if storage.data_ptr() else None


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Recorder(TorchDispatchMode):
    # Without it torch refuses flex_attention and similar ops under a mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # Storages, by address, to copy before an op first writes to them; and (storage, copy) pairs.
        self.watched: dict[int, torch.UntypedStorage] = {}
        self.before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        # Names of parameters and buffers, by the address of their storage.
        self.weights: dict[int, str] = {}
        self._path: list[str] = []
        self._ops: Counter[tuple[str, str]] = Counter()
        self._casts: Counter[tuple[str, str]] = Counter()
        self._cast_bytes: Counter[tuple[str, str]] = Counter()
        # Casts of a part of a weight, by name, address and shape.
        self._weight_casts: Counter[tuple[str, int, torch.Size]] = Counter()
        self._misfits, self._fp32_products, self._fp64_ops = (Counter[str]() for _ in range(3))

    def write_back(self) -> None:
        for storage, content in self.before:
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)

    def enter(self, name: str, *_: Any) -> None:
        self._path.append(name)

    def leave(self, name: str, *_: Any) -> None:
        # If another hook raised before ``enter``, there is nothing to leave.
        if self._path[-1:] == [name]:
            self._path.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "decompose"):  # else a higher-order operator: counts as one op
            # In inference mode composite ops arrive undecomposed. A few have a second, Python decomposition
            # (py_kernels), which is not the one that runs.
            if torch.is_inference_mode_enabled() and not func.py_kernels:
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            # _schema is private; nothing public says which arguments an op writes to.
            for i, argument in enumerate(func._schema.arguments):
                written = (args[i] if i < len(args) else kwargs.get(argument.name)) if argument.is_write else ()
                for storage in map(_storage, _tensors(written)):
                    if storage is not None and (watched := self.watched.pop(storage.data_ptr(), None)) is not None:
                        self.before.append((watched, watched.clone()))
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False):
            self._record(func.name().removeprefix("aten::").partition(".")[0].lstrip("_"), args, kwargs, result)
        return result

    def _record(self, op: str, args: tuple, kwargs: Mapping, result: Any) -> None:
        operands = [t for t in _tensors((args, kwargs)) if _is_real(t.dtype)]
        returns_no_tensor = result is not None and not _tensors(result)  # a size or a number
        if not operands or returns_no_tensor or op in _BOOKKEEPING:
            return
        if op in ("to_copy", "copy_"):
            source, target = operands[-1], result if op == "to_copy" else args[0]
            if _is_real(target.dtype) and target.dtype != source.dtype:
                types = _name(source.dtype), _name(target.dtype)
                self._casts[types] += 1
                self._cast_bytes[types] += source.numel() * (source.itemsize + target.itemsize)
                storage = _storage(source)
                if storage is not None and (name := self.weights.get(storage.data_ptr())) is not None:
                    self._weight_casts[name, source.data_ptr(), source.shape] += 1
                return
        dtypes = sorted({t.dtype for t in operands}, key=lambda d: (d.itemsize, str(d)))
        self._ops[op, "+".join(map(_name, dtypes))] += 1
        call = f"{op} in {self._path[-1]}" if self._path and self._path[-1] else op
        if torch.float64 in dtypes or torch.complex128 in dtypes:
            self._fp64_ops[call] += 1
        if not (op in _PRODUCTS or op.startswith(_ATTENTION)):
            return
        if torch.float32 in dtypes:
            self._fp32_products[call] += 1
        elif set(dtypes) <= set(LOW_PRECISION) and (misfit := _misfit(op, args)):
            self._misfits[f"{call} ({misfit})"] += 1

    def explanation(self) -> Explanation:
        casts = [CastCount(*types, n, self._cast_bytes[types]) for types, n in self._casts.items()]
        again: Counter[str] = Counter()
        for (name, *_), n in self._weight_casts.items():
            if n > 1:
                again[name] = max(n, again[name])
        hints = {
            "no tensor cores: dims not multiple of 8": self._misfits,
            "weights cast again (autocast keeps casts of fp32 weights that require grad, in a forward)": again,
            "matrix products or convolutions left in fp32": self._fp32_products,
            "ops in fp64": self._fp64_ops,
        }
        return Explanation(
            [OpCount(op, dtype, n) for (op, dtype), n in self._ops.items()],
            sorted(casts, key=lambda cast: -cast.bytes),
            [f"{text}: {_listed(calls)}" for text, calls in hints.items() if calls],
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(calls: Counter[str]) -> str:
    shown = [call + (f" {n} times" if n > 1 else "") for call, n in list(calls.items())[:_NAMED]]
    return ", ".join(shown + [f"{len(calls) - _NAMED} more"] * (len(calls) > _NAMED))


def _misfit(op: str, args: tuple) -> str:
    """The shapes of a product with a dimension that tensor cores have no tile for, "" if all fit."""
    tensors = _tensors(args)
    if any(t.is_nested for t in tensors):
        return ""
    sizes = ["x".join(map(str, t.shape)) for t in tensors]
    if op in _MATRIX_PRODUCTS:
        dims = (*tensors[-2].shape[-2:], tensors[-1].shape[-1])
        shapes = " @ ".join(sizes[-2:])
    elif op in _CONVOLUTIONS:
        groups = args[8]
        dims = args[1].shape[0] // groups, args[1].shape[1]
        shapes = f"weight {sizes[1]}" + (f", {groups} groups" if groups > 1 else "")
    elif op.startswith(_ATTENTION):
        dims = args[0].shape[-1], args[2].shape[-1]
        shapes = f"heads of {dims[0]}"
    else:
        return ""
    return shapes if any(d % 8 for d in dims) else ""
