"""A module of apex, provided by ampctx. setup.py installs this file under each of apex's top-level names."""

from ampctx.compat.handover import hand_over

hand_over(__name__)
