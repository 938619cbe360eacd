"""apex compatibility: apex's module names, private names and checkpoints.

Only the ``ampctx`` command and ``ampctx.migrate`` import this package. ``doors`` is its only import of private core
names.
"""

from ampctx.compat.install import install_apex, uninstall_apex

__all__ = ["install_apex", "uninstall_apex"]
