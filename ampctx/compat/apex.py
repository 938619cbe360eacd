"""``import ampctx.compat.apex`` makes apex's module names importable: ``install_apex()`` in the form of an import."""

from ampctx.compat.install import install_apex

install_apex()
