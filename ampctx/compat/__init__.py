"""Everything that exists only because apex existed: its module names, its private names, its checkpoints.

Nothing else in ampctx imports this package, but for the ``ampctx`` command and ``ampctx.migrate``, which reads the
table of names. ``doors`` is the one way from here to what ordinary users of the core do not need.
"""

from ampctx.compat.install import install_apex, uninstall_apex

__all__ = ["install_apex", "uninstall_apex"]
