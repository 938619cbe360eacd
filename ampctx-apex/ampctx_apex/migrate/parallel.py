"""apex's DistributedDataParallel and SyncBatchNorm become torch's."""

from __future__ import annotations

import libcst as cst

from ampctx_apex.migrate.analysis import Parsed, Use
from ampctx_apex.migrate.flow import refuse
from ampctx_apex.migrate.report import Edit

_DDP = "torch.nn.parallel.DistributedDataParallel"
_CONVERT = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
TARGETS = {
    "apex.parallel.DistributedDataParallel": _DDP,
    "apex.parallel.distributed.DistributedDataParallel": _DDP,
    "apex.parallel.convert_syncbn_model": _CONVERT,
}
MESSAGES = {
    _DDP: "torch's DistributedDataParallel: delay_allreduce=True becomes find_unused_parameters=True",
    _CONVERT: "torch's SyncBatchNorm",
}
# What becomes of apex's arguments: their value there, and what torch needs instead.
_ARGUMENTS = {
    "delay_allreduce": {"True": "find_unused_parameters=True", "False": ""},
    "gradient_average": {"True": ""},
    "retain_allreduce_buffers": {"False": ""},
    "allreduce_always_fp32": {"False": ""},
    "channel_last": {"False": ""},
}
# Arguments that torch knows by the same name, and those that change no more than rounding.
_SAME = {"module", "device_ids", "output_device", "find_unused_parameters", "broadcast_buffers", "process_group"}
_FREE = {"message_size", "gradient_predivide_factor"}


def replaced(parsed: Parsed, use: Use) -> list[Edit]:
    """The edits of one use.

    Raises:
        NotUnderstood: torch has no equivalent of an argument.
    """
    target = TARGETS[use.name]
    edits = [Edit(*parsed.span(use.chain), target)]
    if use.call is None:
        return edits
    kept = [_argument(parsed, use.call, i, a) for i, a in enumerate(use.call.args)]
    sources = list(parsed.arguments(use.call) or ())
    if kept == sources:
        return edits
    return [Edit(*parsed.span(use.call), f"{target}({', '.join(k for k in kept if k)})")]


def _argument(parsed: Parsed, call: cst.Call, index: int, argument: cst.Arg) -> str:
    source = (parsed.arguments(call) or ())[index]
    name = argument.keyword.value if argument.keyword is not None else ""
    if name in _FREE:
        return ""
    value = parsed.source(argument.value)
    if value in _ARGUMENTS.get(name, {}):
        return _ARGUMENTS[name][value]
    if argument.star or (name and name not in _SAME) or (not name and index > 0):
        raise refuse(parsed, call, f"torch has no equivalent of the argument {source}")
    return source
