"""apex.parallel.LARC is a module; the class in it is ``ampctx.optimizers.LARC``."""

from ampctx.optimizers import LARC

__all__ = ["LARC"]
