"""``amp.explain``: the dtypes of every op in a forward, its casts, and products that cannot use tensor cores.

A ``TorchDispatchMode`` records the ops that reach torch's kernels, after autocast. A ``TorchFunctionMode`` would see
the user's calls, before the casts.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
        table: dict[str, dict[str, int]] = defaultdict(dict)
        for row in self.rows:
            table[row.op][row.dtype] = row.calls
        lines = _table(["op", *dtypes], [[op, *(calls.get(d, ".") for d in dtypes)] for op, calls in table.items()])
        lines.append("")
        if self.casts:
            casts = [[f"{c.source} -> {c.target}", c.calls, f"{c.bytes:,}"] for c in self.casts]
            total = [["all", self.cast_count, f"{self.cast_bytes:,}"]] if len(casts) > 1 else []
            lines += _table(["cast", "calls", "bytes"], casts + total)
        else:
            lines.append("no casts")
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
    with ExitStack() as stack:
        # A mode does not see compiled code, and torch never compiles code again that it first met under a mode.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_generators_restored(model, (args, kwargs)))
        stack.enter_context(_modules_restored(model))
        stack.enter_context(_tensors_restored(model, (args, kwargs), recorder))
        stack.enter_context(_sharding_restored(model))
        stack.enter_context(_buffers_lent(model))
        stack.enter_context(_paths(model, recorder))
        stack.enter_context(_no_cached_casts())
        recorder.name_weights(model)
        stack.enter_context(recorder)
        model(*args, **kwargs)
    return recorder.explanation()


# --- restoring state --------------------------------------------------------------------------------------------------


@contextmanager
def _generators_restored(model: nn.Module, batch: Any) -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator()
    kind = None if accelerator is None else accelerator.type
    tensors = (*model.parameters(), *model.buffers(), *_tensors(batch))
    devices = {t.device.index for t in tensors if t.device.type == kind}
    numpy: Any = sys.modules.get("numpy")
    python, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpys is not None:
            numpy.random.set_state(numpys)


@contextmanager
def _modules_restored(model: nn.Module) -> Iterator[None]:
    """Restores attributes of modules, and the contents of their lists, dicts and sets."""
    before = []
    for module in model.modules():
        attributes = dict(vars(module))
        # Not _parameters: the code that shards them replaces entries.
        containers = [v for k, v in attributes.items() if k != "_parameters" and isinstance(v, (list, dict, set))]
        contents = [(v, dict(v) if isinstance(v, dict) else list(v)) for v in containers]
        before.append((vars(module), attributes, contents))
    try:
        yield
    finally:
        for state, attributes, contents in before:
            state.update(attributes)
            for name in state.keys() - attributes.keys():
                del state[name]
            for value, content in contents:
                # Leave unchanged ones alone: some subclasses cannot be written to.
                if not _same_elements(value, content):
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)


def _same_elements(a: Any, b: Any) -> bool:
    def ids(value: Any) -> list[int]:
        return [id(v) for v in (*value, *(value.values() if isinstance(value, dict) else ()))]

    return ids(a) == ids(b)


@contextmanager
def _tensors_restored(model: nn.Module, batch: Any, recorder: _Recorder) -> Iterator[None]:
    """Restores weights, gradients and arguments. The recorder copies a tensor just before an op first writes to it."""
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters]
    forms = []
    for t in (*parameters, *(grad for grad in grads if grad is not None), *model.buffers(), *_tensors(batch)):
        if (storage := _storage(t)) is not None:
            recorder.watched[storage.data_ptr()] = storage
            forms.append((t, t.requires_grad, _layout(t)))
    try:
        yield
    finally:
        for storage, content in recorder.before:
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)
        for t, requires_grad, layout in forms:
            if _layout(t) != layout:
                with torch.no_grad():
                    t.as_strided_(*layout)
            if t.is_leaf and t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
        for p, grad in zip(parameters, grads, strict=True):
            if p.grad is not grad:
                p.grad = grad


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset()


@contextmanager
def _sharding_restored(model: nn.Module) -> Iterator[None]:
    """Reshards ``fully_shard`` units: without a backward they stay unsharded, and are stale after a step."""
    # If there is an instance, its module has been imported.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    units = [m for m in model.modules() if isinstance(m, kind)]
    before = [list(map(id, unit.parameters())) for unit in units]
    try:
        yield
    finally:
        for unit, parameters in zip(units, before, strict=True):
            if list(map(id, unit.parameters())) != parameters:
                unit.reshard()


@contextmanager
def _buffers_lent(model: nn.Module) -> Iterator[None]:
    """Runs the forward on copies of the buffers.

    Kernels write running statistics without changing their version counter, and without saying so in the op's schema.
    Restoring the values would count as a write, and a graph that holds the statistics would refuse its backward.
    """
    places = [(m, n, b) for m in model.modules() for n, b in m.named_buffers(recurse=False, remove_duplicate=False)]
    copies = {id(b): b.detach().clone() for _, _, b in places}
    try:
        for module, name, buffer in places:
            setattr(module, name, copies[id(buffer)])
        yield
    finally:
        for module, name, buffer in places:
            setattr(module, name, buffer)


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Empties autocast's cache: earlier casts would be missing in the count, and casts of copies must not stay."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _paths(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tells the recorder which module runs, with hooks."""
    # With hooks these would not take their fast path.
    fused = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer) and not m.training]
    unwatched = {inner for module in fused for inner in module.modules()}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module not in unwatched and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                enter, leave = recorder.hooks(name)
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


# --- the record -------------------------------------------------------------------------------------------------------


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(t: Tensor) -> str:
    return "x".join(map(str, t.shape))


class _ObservedOp(NamedTuple):
    """An op and its module. ``detail``: the text that a hint adds."""

    op: str
    path: str
    detail: str = ""

    def __str__(self) -> str:
        place = f" in {self.path}" if self.path else ""
        return self.op + place + (f" ({self.detail})" if self.detail else "")


class _Recorder(TorchDispatchMode):
    # Without it torch refuses flex_attention and similar ops under a mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # Storages, by address, to copy before an op first writes to them; and (storage, copy) pairs.
        self.watched: dict[int, torch.UntypedStorage] = {}
        self.before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._path: list[str] = []
        self._names: dict[int, str] = {}
        self._ops: Counter[tuple[str, str]] = Counter()
        self._casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        self._cast_bytes: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        # Casts of a part of a weight, by name, address and shape.
        self._weight_casts: Counter[tuple[str, int, torch.Size]] = Counter()
        self._misfits: Counter[_ObservedOp] = Counter()
        self._fp32_products: Counter[_ObservedOp] = Counter()
        self._fp64_ops: Counter[_ObservedOp] = Counter()

    def name_weights(self, model: nn.Module) -> None:
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if (storage := _storage(t)) is not None:
                self._names.setdefault(storage.data_ptr(), name)

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """A pre-hook and a hook for the module of this name."""

        def enter(*_: Any) -> None:
            self._path.append(name)

        def leave(*_: Any) -> None:
            # If another hook raised before ``enter``, there is nothing to leave.
            if self._path[-1:] == [name]:
                self._path.pop()

        return enter, leave

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
            self._keep_what_is_written(func, args, kwargs)
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False):
            self._record(func.name().removeprefix("aten::").partition(".")[0].lstrip("_"), args, kwargs, result)
        return result

    def _keep_what_is_written(self, func: Any, args: tuple, kwargs: Mapping) -> None:
        # _schema is private; nothing public says which arguments an op writes to.
        for i, argument in enumerate(func._schema.arguments):
            if not argument.is_write:
                continue
            for t in _tensors(args[i] if i < len(args) else kwargs.get(argument.name)):
                storage = _storage(t)
                watched = None if storage is None else self.watched.pop(storage.data_ptr(), None)
                if watched is not None:
                    self.before.append((watched, watched.clone()))

    def _record(self, op: str, args: tuple, kwargs: Mapping, result: Any) -> None:
        operands = [t for t in _tensors((args, kwargs)) if _is_real(t.dtype)]
        asks = result is not None and not _tensors(result)  # returns a size or a number
        if not operands or asks or op in _BOOKKEEPING:
            return
        if op in ("to_copy", "copy_"):
            source, target = operands[-1], result if op == "to_copy" else args[0]
            if _is_real(target.dtype) and target.dtype != source.dtype:
                self._record_cast(source, target)
                return
        dtypes = sorted({t.dtype for t in operands}, key=lambda d: (d.itemsize, str(d)))
        self._ops[op, "+".join(map(_name, dtypes))] += 1
        call = _ObservedOp(op, self._path[-1] if self._path else "")
        if torch.float64 in dtypes or torch.complex128 in dtypes:
            self._fp64_ops[call] += 1
        if not (op in _PRODUCTS or op.startswith(_ATTENTION)):
            return
        if torch.float32 in dtypes:
            self._fp32_products[call] += 1
        elif set(dtypes) <= set(LOW_PRECISION) and (misfit := _misfit(op, args)):
            self._misfits[call._replace(detail=misfit)] += 1

    def _record_cast(self, source: Tensor, target: Tensor) -> None:
        types = source.dtype, target.dtype
        self._casts[types] += 1
        self._cast_bytes[types] += source.numel() * (source.itemsize + target.itemsize)
        storage = _storage(source)
        name = None if storage is None else self._names.get(storage.data_ptr())
        if name is not None:
            self._weight_casts[name, source.data_ptr(), source.shape] += 1

    def explanation(self) -> Explanation:
        casts = [CastCount(_name(a), _name(b), n, self._cast_bytes[a, b]) for (a, b), n in self._casts.items()]
        return Explanation(
            [OpCount(op, dtype, n) for (op, dtype), n in self._ops.items()],
            sorted(casts, key=lambda cast: -cast.bytes),
            self._hints(),
        )

    def _hints(self) -> list[str]:
        again: Counter[str] = Counter()
        for (name, *_), n in self._weight_casts.items():
            if n > 1:
                again[name] = max(n, again[name])
        return [
            text + _listed(calls)
            for text, calls in (
                ("no tensor cores: dims not multiple of 8: ", self._misfits),
                (
                    "weights cast again (autocast keeps casts of fp32 weights that require grad, in a forward): ",
                    again,
                ),
                ("matrix products or convolutions left in fp32: ", self._fp32_products),
                ("ops in fp64: ", self._fp64_ops),
            )
            if calls
        ]


def _listed(calls: Mapping[Any, int]) -> str:
    shown = [str(call) + (f" {n} times" if n > 1 else "") for call, n in list(calls.items())[:_NAMED]]
    more = [f"{len(calls) - _NAMED} more"] * (len(calls) > _NAMED)
    return ", ".join(shown + more)


def _misfit(op: str, args: tuple) -> str:
    """The shapes of a product with a dimension that tensor cores have no tile for, "" if all fit."""
    if any(t.is_nested for t in _tensors(args)):
        return ""
    if op in _MATRIX_PRODUCTS:
        a, b = _tensors(args)[-2:]
        dims, shapes = (*a.shape[-2:], b.shape[-1]), f"{_sizes(a)} @ {_sizes(b)}"
    elif op in _CONVOLUTIONS:
        weight, groups = args[1], args[8]
        dims = weight.shape[0] // groups, weight.shape[1]
        shapes = f"weight {_sizes(weight)}" + (f", {groups} groups" if groups > 1 else "")
    elif op.startswith(_ATTENTION):
        dims = args[0].shape[-1], args[2].shape[-1]
        shapes = f"heads of {args[0].shape[-1]}"
    else:
        return ""
    return shapes if any(d % 8 for d in dims) else ""
