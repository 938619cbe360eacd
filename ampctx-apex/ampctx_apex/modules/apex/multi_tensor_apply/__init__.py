"""apex.multi_tensor_apply: calls the functions of amp_C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampctx import AmpTypeError, AmpValueError


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Raises:
        AmpTypeError, AmpValueError: ``chunk_size`` is no int > 0.
    """

    # Code with a slow path for a missing extension reads this. Our ops always work.
    available = True
    # apex's other attributes about a missing extension: whether it has warned, and the ImportError.
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
            raise AmpTypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        if chunk_size <= 0:
            raise AmpValueError(f"chunk_size is {chunk_size}, expected an int > 0")
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing. apex raises here if its extension is missing."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any) -> Any:
        """Calls ``op`` and returns its result."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
