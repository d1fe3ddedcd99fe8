import os

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("OASES_TEST_VIRTUAL"):  # in a process of its own: the device is that of every test
    DEVICES = ["virtual"]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Every test of a kernel runs on the CPU, and on a GPU by `make test-gpu`."""
    if request.param == "virtual":
        import device as virtual

        virtual.build()
        virtual.loaded()
    return request.param
