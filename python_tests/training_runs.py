"""Fixtures of training runs, which tests of training and of checkpoints share."""

import kills
import pytest
from plan_runs import DEEP, MODEL, one_process


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The path of a text of 4000 lines."""
    return str(kills.write_corpus(tmp_path_factory.mktemp("text") / "text.txt"))


@pytest.fixture(scope="session")
def plain_run(corpus):
    """Losses, gradients and weights of one process, of the model of `plan_runs`."""
    return one_process(MODEL, corpus)


@pytest.fixture(scope="session")
def deep_plain_run(corpus):
    """Those of the model of four layers."""
    return one_process(DEEP, corpus)
