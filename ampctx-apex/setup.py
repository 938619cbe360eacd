"""Adds the file that Python reads at each start. pyproject.toml has the rest."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithStartup(build_py):
    def run(self):
        super().run()
        # An editable install takes from build_lib only what is in the source tree.
        place = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        line = "import ampctx_apex.startup; ampctx_apex.startup.serve()\n"
        Path(place).mkdir(parents=True, exist_ok=True)
        Path(place, "ampctx_apex.pth").write_text(line)


setup(cmdclass={"build_py": WithStartup})
