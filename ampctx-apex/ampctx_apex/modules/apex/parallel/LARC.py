"""apex.parallel.LARC is a module; the class in it is ``ampctx.optimizers.LARC``."""
