"""Python runs this file at startup if its directory is on PYTHONPATH. With AMPCTX_APEX=1, apex imports get ampctx.

    AMPCTX_APEX=1 PYTHONPATH="$(ampctx path)" python train.py

Child processes inherit both variables. ampctx is imported only when the program imports apex.
"""

import importlib.machinery
import importlib.util
import os
import sys

# The top-level names, read from the files: to import ampctx is slow.
_MODULES = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "modules")
_ROOTS = {name.partition(".")[0] for name in os.listdir(_MODULES)} - {"__pycache__"}


class _OnDemand:
    """Installs the apex names on the first apex import, because importing ampctx and torch is slow."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname not in _ROOTS:
            return None
        sys.meta_path.remove(_OnDemand)
        from ampctx.compat import install_apex

        install_apex()
        return importlib.util.find_spec(fullname)

    @staticmethod
    def find_distributions(context=None):
        """For programs that check apex's version before they import it."""
        if getattr(context, "name", None) != "apex":
            return []
        from ampctx.compat.distribution import ApexDistribution

        return [ApexDistribution()]


def _run_hidden_one():
    """Runs the sitecustomize that this file shadows, if any."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [p for p in sys.path if os.path.realpath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("AMPCTX_APEX") == "1":
    sys.meta_path.insert(0, _OnDemand)
_run_hidden_one()
