"""Makes ``import apex`` work in every program: ampctx_apex.pth calls ``serve`` at each start of Python.

``serve`` puts one finder into ``sys.meta_path``. ampctx and torch are imported only when a program imports apex. The
environment variable AMPCTX_APEX chooses: "0" adds no finder, "1" serves apex even if another apex is installed.
"""

import os
import sys

from ampctx_apex.roots import ROOTS


class ApexFinder:
    """Finds apex's names, and the version of apex in ``importlib.metadata``. Another apex comes first."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname not in ROOTS or other_apex() or "apex" in sys.modules:
            return None
        from ampctx import AmpError
        from ampctx_apex.install import install_apex, served

        try:
            install_apex()
        except AmpError as error:
            raise ImportError(str(error), name=fullname) from error
        return served(fullname)

    @staticmethod
    def find_distributions(context=None):
        # pip lists all distributions, and must not see one that it cannot uninstall.
        if getattr(context, "name", None) != "apex" or other_apex():
            return []
        from ampctx_apex.distribution import ApexDistribution

        return [ApexDistribution()]


def other_apex():
    """The spec of an apex that ampctx-apex does not serve and must not hide, or None.

    A folder without ``__init__.py``, such as a checkout of apex, is none.
    """
    if os.environ.get("AMPCTX_APEX") == "1":
        return None
    for finder in sys.meta_path:
        is_ours = str(getattr(finder, "__module__", "")).startswith("ampctx_apex.")
        if not is_ours and hasattr(finder, "find_spec"):
            spec = finder.find_spec("apex", None)
            if spec is not None and spec.origin is not None:
                return spec
    return None


def serve():
    if os.environ.get("AMPCTX_APEX") != "0":
        sys.meta_path.insert(0, ApexFinder)
