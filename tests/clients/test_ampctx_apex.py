"""Programs find apex where ampctx-apex is installed: in a process where nothing calls ``install_apex`` before them."""

import os

import apex_environment as environments
import pytest


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    environment = environments.Environment(tmp_path_factory.mktemp("environment"), environments.ROOT)
    environment.install(environments.ours(tmp_path_factory.mktemp("ours")))
    return environment


PACKAGES = os.environ.get("PYTHONPATH", "")


def test_transformers_finds_apex(environment):
    code = "from transformers.utils import is_apex_available; print(is_apex_available())"
    assert environment.run("-W", "ignore", "-c", code, PYTHONPATH=PACKAGES) == "True\n"


@pytest.mark.parametrize(
    ("file", "tests", "count"),
    [
        ("test_transformers.py", "does_what_the_loop_does and O2", 4),
        ("test_lightning.py", "plain or manual", 4),
    ],
)
def test_programs_train_with_plain_python(environment, file, tests, count):
    program = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/clients/{file}", "-k", tests]
    out = environment.run(*program, cwd=environments.ROOT, PYTHONPATH=PACKAGES)
    assert f"{count} passed" in out
