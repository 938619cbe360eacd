"""Notes on errors about dtypes that leave a cast model's forward: the module, and what to write there."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

import torch
from torch import nn

from ampctx._errors import AmpError

# What torch's texts have in common, and what to write. The first row that fits counts.
_CURES = (
    ("without overflow", "Mask with torch.finfo(x.dtype).min in place of -1e9."),
    ("not implemented for '(Half|BFloat16)'", "Compute this op in fp32: amp.initialize(..., ops_fp32=[...])."),
    (
        "dtype|scalar type|c10::",
        "New tensors are float32 in torch, and so are buffers of modules without parameters. Make them like others: "
        "x.new_zeros(...), dtype=x.dtype, table.to(x.dtype).",
    ),
)


def _cure(error: BaseException | None) -> str | None:
    """The fix for an error of torch's about dtypes, which can take a note and has none yet."""
    if not hasattr(error, "add_note") or isinstance(error, AmpError) or hasattr(error, "__notes__"):  # Python 3.10
        return None
    cures = _CURES if isinstance(error, (RuntimeError, TypeError)) else ()
    return next((cure for pattern, cure in cures if re.search(pattern, str(error))), None)


def note_dtypes(model: nn.Module, low: torch.dtype, has_low_weights: bool) -> None:
    """Called by hooks that torch calls after an error, too. Adds the note to an error of torch's, once.
    ``has_low_weights``: the level has cast the weights to ``low``."""
    error: Any = sys.exc_info()[1]
    if (cure := _cure(error)) is None:
        return
    names, found = {id(m): name for name, m in model.named_modules()}, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(module := frame.f_locals.get("self"), nn.Module) and id(module) in names:
            found = module
    if found is None:  # an error of others, which handle it now
        return
    name = names[id(found)]
    which = f'"{name}" ({type(found).__name__})' if name else type(found).__name__
    kept = f'Or keep the module in fp32: keep_fp32="{name}". ' if name else ""
    params = list(model.parameters()) if has_low_weights else ()
    if params and all(type(p) is nn.Parameter and p.dtype != low for p in params):  # no DTensors
        now, kept = str(params[0].dtype).removeprefix("torch."), ""
        cure = f"But weights are {now} now: converted after amp.initialize. Use amp.master_model(model)."
    error.add_note(
        f"ampctx: {which} computes in {str(low).removeprefix('torch.')}. {cure} {kept}"
        "See `ampctx explain expected-scalar-type`."
    )


def note_casts_off(error: Any) -> None:
    """Adds the note to an error about dtypes that leaves a backward at O1 and O4."""
    if _cure(error) is not None:
        error.add_note(
            "ampctx: casts are off inside scale_loss. If backward of a torch.autograd.Function multiplies matrices, "
            "decorate both methods with torch.amp.custom_fwd and custom_bwd, for its forward's casts. "
            "See `ampctx explain expected-scalar-type`."
        )
