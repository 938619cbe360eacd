"""apex's module names, private names and checkpoints over ampctx: programs written for apex run unedited.

Python imports this package at each start, for ``startup``. So it imports ampctx, and with it torch, only when asked.
"""

# Not from typing, whose import would take longer than the rest of the start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ampctx_apex.install import install_apex, uninstall_apex

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in __all__:
        from ampctx_apex import install

        return getattr(install, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["install_apex", "uninstall_apex"]
