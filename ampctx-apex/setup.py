"""Builds ampctx-apex. The names of the modules and the version come from ampctx, beside this folder."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import SetupError

HERE = Path(__file__).resolve().parent
AMPCTX = HERE.parent / "ampctx"
if not (AMPCTX / "__init__.py").exists():
    raise SetupError(f"{AMPCTX} does not exist. Build ampctx-apex in a checkout of ampctx")
VERSION = re.search(r'^__version__ = "(.+)"$', (AMPCTX / "__init__.py").read_text(), flags=re.M)[1]
MODULES = AMPCTX / "compat" / "modules"
NAMES = sorted(path.stem for path in MODULES.iterdir() if not path.name.startswith(("_", ".")))


class BuildModules(build_py):
    """Takes module.py for each of apex's names, and adds the line that Python runs at startup."""

    def find_modules(self):
        return [("", name, "module.py" if name in NAMES else f"{name}.py") for name in self.py_modules]

    def run(self):
        super().run()
        Path(self.build_lib, "ampctx_apex.pth").write_text("import ampctx_apex_metadata\n")


class NoEditable(editable_wheel):
    def run(self):
        raise SetupError("ampctx-apex cannot be installed with -e. Run: pip install ./ampctx-apex")


setup(
    version=VERSION,
    install_requires=[f"ampctx=={VERSION}"],
    py_modules=["ampctx_apex_metadata", *NAMES],
    cmdclass={"build_py": BuildModules, "editable_wheel": NoEditable},
)
