"""``amp.count_ops``: the dtypes of every op in a forward, its casts, and products that cannot use tensor cores.

A ``TorchDispatchMode`` records the ops that reach torch's kernels, after autocast.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# torch's notes on extending PyTorch import it from this private module. A test guards it.
from torch.utils._python_dispatch import TorchDispatchMode

from ampctx._errors import AmpError, AmpTypeError, listed
from ampctx.casts.arguments import LOW_PRECISION, map_leaves, tensors_in
from ampctx.kernels.sharding import reshard_units

# Ops that compute nothing, besides those that return views.
_BOOKKEEPING = {"empty_like", "new_empty", "new_empty_strided", "unsafe_view"}
# Ops for tensor cores: matrix products (of their last two tensors), convolutions, attention, recurrent layers.
_MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul"}
_CONVOLUTIONS = {"convolution", "convolution_overrideable"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "cudnn_rnn"}
_PRODUCTS = _MATRIX_PRODUCTS | _CONVOLUTIONS | _RECURRENT | {"mv", "addmv", "mkldnn_linear"}
_ATTENTION = "scaled_dot_product"
_MISFITS = "no tensor cores: dims not multiple of 8"
_AGAIN = "weights cast again (autocast keeps casts of fp32 weights that require grad, in a forward)"
_FP32_PRODUCTS = "matrix products or convolutions left in fp32"
_FP64_OPS = "ops in fp64"


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
class OpReport:
    """The result of ``amp.count_ops``. ``print`` shows it as a table; programs use the fields.

    Attributes:
        rows: the calls of each op in each dtype, in the order of the first call.
        casts: the casts, the most bytes first.
        hints: sentences on possible costs of speed.
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


def count_ops(model: nn.Module, /, *args: Any, **kwargs: Any) -> OpReport:
    """Runs ``model(*args, **kwargs)`` once and returns the dtypes of its ops. Print the result.

    The forward runs with the current settings: opt level, train or eval mode, and any ``torch.autocast``,
    ``torch.no_grad`` or ``amp.disable_casts`` block around the call. Compiled code runs op by op. There is no backward;
    its ops would use the dtypes of the forward. One rank may call it alone: it runs the module inside
    DistributedDataParallel and DataParallel. Host syncs: those of the forward, and of saving the generators.

    Nothing changes, even if the forward raises: ``count_ops`` restores weights, buffers, gradients, random number
    generators (torch, Python, NumPy) and attributes of the modules, and passes copies of tensor arguments. It needs
    memory for a copy of all these tensors, and empties autocast's weight cache.

    Args:
        model: any module, with or without ``amp.initialize``. To include the loss, pass a module that computes it.
        *args, **kwargs: the arguments of the model: tensors of any dtype and shape, or other objects.

    Returns:
        An ``OpReport``: ops with floating or complex arguments under the names of torch's kernels (``addmm`` for a
        linear layer), without views; casts; hints.

    Raises:
        AmpTypeError: ``model`` is no module.
        AmpError: a lazy parameter has no values before the first forward.
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(
            f"count_ops: model must be a torch.nn.Module, got {type(model).__name__}. Call a function in its forward."
        )
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    lazy = next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise AmpError(f"count_ops: {lazy} of the model is not initialized yet: run one forward first.")
    recorder, copies = _Recorder(model), dict[int, Tensor]()

    def copied(t: Tensor) -> Tensor:
        return copies.setdefault(id(t), t.detach().clone().requires_grad_(t.requires_grad))

    args, kwargs = map_leaves((args, kwargs), copied, objects=False)
    # A mode does not see compiled code, and torch never compiles code again that it first met under a mode.
    with torch.compiler.set_stance("force_eager"), _restored(model, copies.values(), recorder), recorder:
        model(*args, **kwargs)
    return recorder.report()


@contextmanager
def _restored(model: nn.Module, batch: Iterable[Tensor], recorder: _Recorder) -> Iterator[None]:
    """Undoes all that a forward changes in the model, the last line first, also if it raises."""
    reshard_units(model)
    modules, parameters, buffers = list(model.modules()), list(model.parameters()), list(model.buffers())
    accelerator = torch.accelerator.current_accelerator()
    kind = None if accelerator is None else accelerator.type
    devices = {t.device.index for t in (*parameters, *buffers, *batch) if t.device.type == kind}
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
            undo.callback(setattr, p, "grad", p.grad)
            undo.callback(p.requires_grad_, p.requires_grad)
        # Through storages: a tensor's copy_ would count as a write, which backwards of before refuse.
        found = map(_storage, (*parameters, *buffers, *(p.grad for p in parameters if p.grad is not None)))
        for storage in {each.data_ptr(): each for each in found if each is not None}.values():
            undo.callback(_write_back, storage, storage.clone())
        undo.callback(reshard_units, model)
        for module in modules:
            if module not in fused and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                undo.callback(module.register_forward_pre_hook(recorder.enter, prepend=True).remove)
                undo.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
        # Earlier casts would be missing in the count, and casts of copies must not stay.
        undo.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        yield


def _write_back(storage: torch.UntypedStorage, content: torch.UntypedStorage) -> None:
    if storage.nbytes() != content.nbytes():
        storage.resize_(content.nbytes())
    storage.copy_(content)


def _refill(value: Any, content: Any) -> None:
    parts = [[*map(id, v), *map(id, v.values() if isinstance(v, dict) else ())] for v in (value, content)]
    if parts[0] != parts[1]:  # leave unchanged ones alone: some subclasses cannot be written to
        value.clear()
        value.extend(content) if isinstance(value, list) else value.update(content)


def _storage(t: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor. None for tensor wrappers and for nested, sparse or empty tensors."""
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ or t.is_nested or t.layout is not torch.strided:
        return None
    return t.untyped_storage() if t.untyped_storage().data_ptr() else None


class _Recorder(TorchDispatchMode):
    # Without it torch refuses flex_attention and similar ops under a mode.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Names of parameters and buffers, by the address of their storage. The first name of each counts.
        named = [(name, _storage(t)) for name, t in (*model.named_parameters(), *model.named_buffers())]
        self._weights = {each.data_ptr(): name for name, each in reversed(named) if each is not None}
        self._names = {module: name for name, module in model.named_modules()}
        self._path: list[nn.Module] = []
        # Calls and bytes, by dtypes. Casts of a part of a weight, by name, address and shape.
        self._ops, self._casts = Counter[tuple[str, str]](), dict[tuple[str, str], list[int]]()
        self._weight_casts = Counter[tuple[str, int, torch.Size]]()
        self._hints = {text: Counter[str]() for text in (_MISFITS, _AGAIN, _FP32_PRODUCTS, _FP64_OPS)}

    def enter(self, module: nn.Module, *_: Any) -> None:
        self._path.append(module)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self._path[-1:] == [module]:  # else another hook raised before ``enter``
            self._path.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        kwargs = kwargs or {}
        # In inference mode composite ops arrive undecomposed. Higher-order operators cannot be decomposed. A few have a
        # second, Python decomposition (py_kernels), which is not the one that runs.
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose") and not func.py_kernels:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False):
            self._record(func.name().removeprefix("aten::").partition(".")[0].lstrip("_"), args, kwargs, result)
        return result

    def _record(self, op: str, args: tuple, kwargs: Mapping, result: Any) -> None:
        operands = [t for t in tensors_in(args, dict(kwargs)) if t.is_floating_point() or t.is_complex()]
        is_number = result is not None and not tensors_in((result,), {})
        if not operands or op in _BOOKKEEPING or is_number:
            return
        if op in ("to_copy", "copy_"):
            source, target = operands[-1], result if op == "to_copy" else args[0]
            if (target.is_floating_point() or target.is_complex()) and target.dtype != source.dtype:
                cast = self._casts.setdefault((_name(source.dtype), _name(target.dtype)), [0, 0])
                cast[:] = cast[0] + 1, cast[1] + source.numel() * (source.itemsize + target.itemsize)
                if (storage := _storage(source)) is not None and storage.data_ptr() in self._weights:
                    name = self._weights[storage.data_ptr()]
                    part = name, source.data_ptr(), source.shape
                    self._weight_casts[part] += 1
                    if self._weight_casts[part] > 1:
                        self._hints[_AGAIN][name] = max(self._weight_casts[part], self._hints[_AGAIN][name])
                return
        dtypes = {t.dtype for t in operands}
        self._ops[op, "+".join(map(_name, sorted(dtypes, key=lambda d: (d.itemsize, str(d)))))] += 1
        module = self._names.get(self._path[-1]) if self._path else None
        call = f"{op} in {module}" if module else op
        if dtypes & {torch.float64, torch.complex128}:
            self._hints[_FP64_OPS][call] += 1
        if op in _PRODUCTS or op.startswith(_ATTENTION):
            if torch.float32 in dtypes:
                self._hints[_FP32_PRODUCTS][call] += 1
            elif dtypes <= set(LOW_PRECISION) and (misfit := _misfit(op, args)):
                self._hints[_MISFITS][f"{call} ({misfit})"] += 1

    def report(self) -> OpReport:
        ops = [OpCount(op, dtype, n) for (op, dtype), n in self._ops.items()]
        casts = [CastCount(*types, *counts) for types, counts in self._casts.items()]
        hints = [
            f"{text}: {listed([call + (f' {n} times' if n > 1 else '') for call, n in calls.items()])}"
            for text, calls in self._hints.items()
            if calls
        ]
        return OpReport(ops, sorted(casts, key=lambda cast: -cast.bytes), hints)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _misfit(op: str, args: tuple) -> str:
    """The shapes of a product with a dimension that tensor cores have no tile for, "" if all fit."""
    tensors, dims, shapes = tensors_in(args, {}), list[int](), ""
    if any(t.is_nested for t in tensors):
        return ""
    sizes = ["x".join(map(str, t.shape)) for t in tensors]
    if op in _MATRIX_PRODUCTS:
        dims, shapes = [*tensors[-2].shape[-2:], tensors[-1].shape[-1]], " @ ".join(sizes[-2:])
    elif op in _CONVOLUTIONS:
        dims = [args[1].shape[0] // args[8], args[1].shape[1]]
        shapes = f"weight {sizes[1]}" + (f", {args[8]} groups" if args[8] > 1 else "")
    elif op.startswith(_ATTENTION):
        dims, shapes = [args[0].shape[-1], args[2].shape[-1]], f"heads of {args[0].shape[-1]}"
    return shapes if any(d % 8 for d in dims) else ""
