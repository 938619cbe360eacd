"""``import ampctx.compat.apex`` calls ``install_apex()``, which makes apex's module names importable."""

from ampctx.compat.install import install_apex

install_apex()
