import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: other tests and ranks want the cores
os.environ["OASES_SCHEDULE"] = "oases"  # for "auto", whose bits depend on time; tests of that take it away

import torch
from at_hand import RanksAtHand, poll_often
from script_ranks import ScriptRanks

import oases.terminal
from oases.launch import fork_server
from oases.testing import RankPool

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
fork_server.MODULES += [
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "torch.export._trace",
    "torch._export.non_strict_utils", "oases.autotp.parallelization", "oases.train.trainer",
]  # fmt: skip


oases.terminal._FIRST_LINE_SECONDS = 1e6  # no lines of progress on stderr, which depend on time


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
    with RankPool(2) as pool:
        pool.run(poll_often)
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        pool.run(poll_often)
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
