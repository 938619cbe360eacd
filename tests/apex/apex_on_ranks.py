"""For tests whose bodies run on ranks, to be imported before apex: ranks have no conftest."""

from ampctx_apex import install_apex

install_apex()
