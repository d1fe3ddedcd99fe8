from collections.abc import Iterator

import device
import pytest

from oases.testing import RankPool


@pytest.fixture(scope="session")
def virtual_device() -> None:
    device.build()


@pytest.fixture(scope="session")
def two_virtual(virtual_device: None) -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_virtual(virtual_device: None) -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_virtual(virtual_device: None) -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
