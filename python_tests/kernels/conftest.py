import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Every test of a kernel runs on the CPU, and on a GPU by `make test-gpu`."""
    return request.param
