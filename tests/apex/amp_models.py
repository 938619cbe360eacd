"""The tests' ``Probe`` under apex.amp, at a dynamic scale of 4096."""

import kit
from apex import amp
from kit import Probe, same

# An optimizer that unscales itself, and one that does not.
BOTH = ("FusedAdam", "SGD-plain")


def probe(level="O2", make=None, **options):
    return kit.probe(amp, level, make=make, **{"loss_scale": "dynamic", **options})


def backward(model, optimizer, factor=1.0, **options):
    kit.backward(amp, model.loss(factor), optimizer, **options)


def weights(optimizer):
    """Copies of what the optimizer steps."""
    return [p.detach().clone() for p in amp.master_params(optimizer)]


__all__ = ["BOTH", "Probe", "backward", "probe", "same", "weights"]
