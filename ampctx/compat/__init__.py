"""Everything that exists only because apex existed: its module names, its private names, the migration tool.

Nothing else in ampctx imports this package, but for the ``ampctx`` command.
"""

from ampctx.compat.install import install_apex, uninstall_apex

__all__ = ["install_apex", "uninstall_apex"]
