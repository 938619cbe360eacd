"""``importlib.metadata.version("apex")`` of ampctx-apex, for programs that ask before they import apex.

Python imports this file at startup, because ampctx_apex.pth says so. It imports ampctx only to answer.
"""

import sys


class ApexMetadata:
    """Last in ``sys.meta_path``, so that the metadata of an installed apex comes first. Finds no modules."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        return None

    @staticmethod
    def find_distributions(context=None):
        # pip lists all distributions, and must not see one that it cannot uninstall.
        if getattr(context, "name", None) != "apex":
            return []
        try:
            from ampctx.compat.handover import distributions
        except ImportError:
            # No ampctx or no torch: apex cannot be imported either.
            return []
        return distributions()


sys.meta_path.append(ApexMetadata)
