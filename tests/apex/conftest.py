import pytest
from ampctx_apex import install_apex

from ampctx import amp

# Before the test modules here are imported: they begin with "from apex import ...".
install_apex()


@pytest.fixture(autouse=True)
def _clean_session():
    yield
    amp.reset()
