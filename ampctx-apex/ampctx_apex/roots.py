"""The folder of apex's modules, and the top-level names of apex: the package and its compiled extensions."""

import os

MODULES = os.path.join(os.path.dirname(os.path.realpath(__file__)), "modules")
ROOTS = tuple(sorted(name.partition(".")[0] for name in os.listdir(MODULES) if not name.startswith(("_", "."))))
