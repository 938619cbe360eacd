import pytest

from ampctx.amp import AmpSession


@pytest.fixture
def session():
    """A session of the test's own, undone afterwards."""
    session = AmpSession()
    yield session
    session.reset()
