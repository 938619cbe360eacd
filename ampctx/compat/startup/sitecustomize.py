"""Run by Python at its start where this directory is on PYTHONPATH: with AMPCTX_APEX=1 the apex names lead to ampctx.

    AMPCTX_APEX=1 PYTHONPATH="$(ampctx path)" python train.py

Child processes inherit both variables. Nothing is imported before a program asks for apex.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _OnDemand:
    """Installs the apex names when one of them is first looked for: ampctx imports torch, which takes its time."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname not in ("apex", "amp_C", "apex_C"):
            return None
        sys.meta_path.remove(_OnDemand)
        from ampctx.compat import install_apex

        install_apex()
        return importlib.util.find_spec(fullname)

    @staticmethod
    def find_distributions(context=None):
        """For ``importlib.metadata``: some programs ask for the version of apex before they import it."""
        if getattr(context, "name", None) != "apex":
            return []
        from ampctx.compat.distribution import ApexDistribution

        return [ApexDistribution()]


def _run_hidden_one():
    """Runs the sitecustomize that this file hides, if there is one."""
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
