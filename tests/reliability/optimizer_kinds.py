"""Kinds of optimizers that save their state, and the orders to load three states in."""

import itertools
from functools import partial

from kit import OPTIMIZERS, larc

_ADAM = partial(OPTIMIZERS["FusedAdam"], weight_decay=0.1)
KINDS = {
    **OPTIMIZERS,
    "FusedAdam": _ADAM,
    "FusedNovoGrad": partial(OPTIMIZERS["FusedNovoGrad"], weight_decay=0.1),
    "LARC": larc,
    "AdamW-foreach": partial(OPTIMIZERS["AdamW-foreach"], amsgrad=True),
    "FusedAdam-stochastic": partial(_ADAM, write_back="stochastic", seed=3),
    "FusedAdam-kahan": partial(_ADAM, write_back="kahan"),
    "FusedAdam-masters": partial(_ADAM, master_weights=True),
    "FusedAdam-split": partial(_ADAM, master_weights="split"),
}
for _name in ("AdamW-fused", "Adagrad-fused", "Adam-foreach", "SGD-foreach", "Adagrad-plain",
              "Adagrad-foreach"):  # fmt: skip
    del KINDS[_name]  # the same classes once more
ORDERS = tuple(itertools.permutations(("model", "optimizer", "amp")))
