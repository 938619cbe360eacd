import pytest

from ampctx import amp
from ampctx.compat import install_apex

# Before the test modules here are imported: they begin with "from apex import ...".
install_apex()


@pytest.fixture(autouse=True)
def _clean_session():
    yield
    amp.reset()
