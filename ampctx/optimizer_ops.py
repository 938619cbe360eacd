"""The public name of ``ampctx.kernels.steps``."""

from ampctx.kernels.steps import adagrad, adam, lamb, larc, novograd, sgd

__all__ = ["adagrad", "adam", "lamb", "larc", "novograd", "sgd"]
