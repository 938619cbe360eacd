"""The version of apex.amp, which apex never changed."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))

__all__ = ["VERSION", "__version__"]
