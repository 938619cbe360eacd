"""FusedMuon over parameters of any shape."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ampctx.optimizers import FusedMuon


def muon(params: Any, **options: Any) -> FusedMuon:
    """FusedMuon with the parameters in their order: each run of matrices, or of others, is a group."""
    params, found = list(params), []
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    for group in groups:
        runs = groupby(group["params"], lambda p: (p[1] if isinstance(p, tuple) else p).dim() in (2, 3))
        found += [{**group, "params": list(run), "use_muon": are_matrices} for are_matrices, run in runs]
    return FusedMuon(found or groups, **{"lr": 0.01, "weight_decay": 0.1, **options})
