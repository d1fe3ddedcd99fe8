"""Fixtures for tests of parallelized models."""

from collections.abc import Iterator

import pytest
from autotp.shared_traces import share_traces, stop_sharing

from oases.testing import RankPool


@pytest.fixture(scope="module")
def shared_traces(two_ranks: RankPool) -> Iterator[None]:
    """Layers of equal models are traced once on the two ranks."""
    two_ranks.run(share_traces)
    yield
    two_ranks.run(stop_sharing)
