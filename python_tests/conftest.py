import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: other tests and ranks want the cores
os.environ["OASES_SCHEDULE"] = "oases"  # for "auto", whose bits depend on time; tests of that take it away

import refusal_log
import torch
from at_hand import RanksAtHand
from script_ranks import ScriptRanks
from training_runs import corpus, deep_plain_run, plain_run  # noqa: F401  (fixtures)

import oases.terminal
from oases.launch import fork_server
from oases.testing import RankPool

RANKS_OVER = os.environ.get("OASES_TEST_BACKEND", "gloo")
"""Backend of the pools that tests share."""

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
fork_server.MODULES += [
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "torch.export._trace",
    "torch._export.non_strict_utils", "oases.autotp.parallelization", "oases_train.trainer",
]  # fmt: skip


if refusal_log.VARIABLE in os.environ:
    refusal_log.start()
oases.terminal._FIRST_LINE_SECONDS = 1e6  # no lines of progress on stderr, which depend on time


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `few` leaves out: all but so many cases of a test, which are spread evenly over its list.

    Its second number is that of the cases that are run by `make test-all`, as long ones; the others are slow.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("few")
        assert mark is not None
        all_runs = _spread(found, mark.args[-1])
        quick = _spread(all_runs, mark.args[0])
        for item in found:
            if item not in quick:
                item.add_marker(pytest.mark.long if item in all_runs else pytest.mark.slow)


def _spread(items: list[pytest.Item], number: int) -> list[pytest.Item]:
    """So many items, spread evenly over a list."""
    number = min(number, len(items))
    return [items[round((each + 0.5) * len(items) / number - 0.5)] for each in range(number)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure out of the user's cache; ranks are started later and inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OASES_CACHE", str(tmp_path_factory.mktemp("cache") / "schedules.json"))
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, RANKS_OVER) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_ranks_of_gloo(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks whose backend sums sparse gradients, as DDP asks it to."""
    if RANKS_OVER == "gloo":
        yield request.getfixturevalue("two_ranks")
        return
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4, RANKS_OVER) as pool:
        yield pool


@pytest.fixture(scope="session")
def script_ranks() -> Iterator[ScriptRanks]:
    ranks = ScriptRanks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def ranks_at_hand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this test run on the pools' ranks; that they start their own is tested where they do."""
    pools = {2: "two_ranks", 4: "four_ranks"}
    monkeypatch.setattr(
        "oases.launch.ranks.run_ranks", RanksAtHand(lambda size: request.getfixturevalue(pools[size]))
    )
