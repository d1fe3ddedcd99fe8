import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Leave what exists already to no garbage collection of this test, so that one takes no second."""
    gc.freeze()
    yield
    gc.unfreeze()
