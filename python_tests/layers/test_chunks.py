"""num_chunks="auto": what is chosen from given times, where it is kept, and that measuring leaves no trace."""

import json
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from called_ops import CalledOps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import oases
from oases import OverlappedColumnLinear, OverlappedColwiseParallel, OverlappedRowLinear, OverlappedRowwiseParallel
from oases.core.execution import autotune
from oases.core.execution.group import scheduler_of
from oases.layers import chunks

IN, OUT = 12, 8
FAST_IN_FOUR = {1: 1.0, 2: 0.9, 4: 0.5}


class Timer:
    """Stands in for the module's timer: runs the op, but returns given seconds by number of chunks."""

    def __init__(self, patch, path, seconds):
        self.turns = []
        self._seconds = seconds
        patch.setattr(autotune, "cache_path", lambda: path)
        patch.setattr(chunks, "timed", self)
        self.forget(patch)

    def forget(self, patch):
        """Leave the file alone to remember."""
        patch.setattr(chunks, "_chosen", WeakKeyDictionary())

    def __call__(self, work, device):
        work()
        self.turns += work.args
        return self._seconds[work.args[0]]


def sent(layer, x):
    """The collectives of one pass of a row layer's forward."""
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.reset_totals()
    layer(x)
    return scheduler.totals()["row forward"].count


def choose(path, seconds, rows=256):
    """(turns, chunks) of a first and a second layer, and of a third with the cache file alone."""
    x = torch.randn(rows, IN // 2)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        timer = Timer(patch, path, seconds[dist.get_rank()])
        for forget in (False, False, True):
            if forget:
                timer.forget(patch)
            timer.turns = []
            found.append((sent(OverlappedRowLinear(IN, OUT), x), timer.turns))
    return found


@pytest.mark.parametrize(
    ("seconds", "chosen", "turns"),
    [
        ([FAST_IN_FOUR, FAST_IN_FOUR], 4, [1, 2, 4] * 2),  # the others are far behind after one round
        (
            [{1: 1.0, 2: 0.9, 4: 0.5}, {1: 1.0, 2: 0.9, 4: 1.2}],
            2,
            [1, 2, 4] * 2 + [1, 2] * 2,
        ),  # the slowest rank counts
        ([{1: 1.0, 2: 0.99, 4: 0.985}] * 2, 1, [1, 2, 4] * (chunks.ROUNDS + 1)),  # not worth it: off
    ],
)
def test_the_fastest_on_the_slowest_rank_is_chosen_and_kept(two_ranks, tmp_path, seconds, chosen, turns):
    path = tmp_path / "cache" / "schedules.json"
    for first, second, third in two_ranks.run(choose, path, seconds):
        assert first == (chosen, turns)
        assert second == third == (chosen, [])
    assert list(json.loads(path.read_text()).values()) == ["off" if chosen == 1 else f"{chosen} chunks"]


@pytest.mark.parametrize(("rows", "candidates"), [(255, [1, 2]), (127, [])])
def test_candidates_are_as_many_as_rows_allow(two_ranks, tmp_path, rows, candidates):
    seconds = [{1: 1.0, 2: 0.9}] * 2
    for first, _, _ in two_ranks.run(choose, tmp_path / "s.json", seconds, rows):
        assert first == (len(candidates) or 1, candidates * 4)


def check_no_trace(path, cls, sequence_parallel):
    scheduler = scheduler_of(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        timer = Timer(patch, path, FAST_IN_FOUR)
        layer = cls(IN, OUT, sequence_parallel=sequence_parallel)
        x = torch.randn(1, 512, IN if cls is OverlappedColumnLinear else IN // 2, requires_grad=True)
        state = torch.get_rng_state()
        scheduler.reset_totals()
        scheduler.set_recording(True)
        with CalledOps() as called:
            y = layer(x)
        scheduler.set_recording(False)
        assert timer.turns
        assert torch.equal(torch.get_rng_state(), state)
        assert x.grad is None
        assert layer.weight.grad is None
        assert {name: n for name, n in called.ops.items() if name.startswith("oases")} == {
            f"oases::{layer.kind}_linear": 1
        }
        y.sum().backward()
        counted = {row.where: row.collectives for row in oases.report().others}
        assert len(scheduler.take_records()) == counted.get(f"{layer.kind} forward", 0)
    return counted


@pytest.mark.parametrize(
    ("cls", "sequence_parallel", "counted"),
    [
        (OverlappedColumnLinear, False, {"column backward": 4}),
        (OverlappedRowLinear, False, {"row forward": 4}),
        (OverlappedColumnLinear, True, {"column forward": 4, "column backward": 4, "column regather": 1}),
        (OverlappedRowLinear, True, {"row forward": 4, "row backward": 4, "row bias": 1}),
    ],
)
def test_measuring_leaves_no_trace(two_ranks, tmp_path, cls, sequence_parallel, counted):
    for found in two_ranks.run(check_no_trace, tmp_path / "s.json", cls, sequence_parallel):
        assert found == counted


def check_not_measured(path):
    with pytest.MonkeyPatch.context() as patch:
        timer = Timer(patch, path, FAST_IN_FOUR)
        x = torch.randn(256, IN // 2)
        layer = OverlappedRowLinear(IN, OUT)
        with torch.no_grad():
            assert sent(layer, x) == 2
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert sent(compiled, x) == 2
        assert OverlappedRowLinear(IN, OUT, device="meta")(x.to("meta")).shape == (256, OUT)
        with FakeTensorMode():
            assert OverlappedRowLinear(IN, OUT)(torch.randn(256, IN // 2)).shape == (256, OUT)
        assert timer.turns == []

        # Too few rows to choose: nothing that a graph could take over.
        assert sent(layer, x[:64]) == 1
        assert sent(compiled, x) == 2
        assert timer.turns == []

        # A choice made by an eager call counts in all of these.
        assert sent(layer, x) == 4
        turns = len(timer.turns)
        with torch.no_grad():
            assert sent(layer, x) == 4
        assert sent(compiled, x) == 4
        assert sent(compiled, x[:64]) == 1, "too few rows for a choice made for more"
        assert len(timer.turns) == turns


@pytest.mark.long
def test_what_cannot_be_measured_goes_by_size(two_ranks, tmp_path):
    two_ranks.run(check_not_measured, tmp_path / "s.json")


def check_many_shapes(path):
    with pytest.MonkeyPatch.context() as patch:
        timer = Timer(patch, path, FAST_IN_FOUR)
        layer = OverlappedRowLinear(IN, OUT)
        counts = [sent(layer, torch.randn(256 + n, IN // 2)) for n in range(chunks.MAX_CALIBRATIONS + 2)]
    return counts, len(timer.turns)


def test_ever_new_lengths_are_not_measured_for_ever(two_ranks, tmp_path):
    for counts, turns in two_ranks.run(check_many_shapes, tmp_path / "s.json"):
        assert counts == [4] * chunks.MAX_CALIBRATIONS + [2, 2]
        assert turns == chunks.MAX_CALIBRATIONS * 3 * 2


def check_styles(path):
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    plain = nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))
    with pytest.MonkeyPatch.context() as patch:
        timer = Timer(patch, path, FAST_IN_FOUR)
        model = parallelize_module(plain, mesh, {"0": OverlappedColwiseParallel(), "2": OverlappedRowwiseParallel()})
        scheduler_of(dist.group.WORLD).reset_totals()
        for _ in range(2):
            model(torch.randn(256, IN)).sum().backward()
    counted = {row.where: row.collectives for row in oases.report().others}
    return len(timer.turns), counted["row forward"]


def test_styles_measure_too(two_ranks, tmp_path):
    for turns, collectives in two_ranks.run(check_styles, tmp_path / "s.json"):
        assert turns == 2 * 3 * 2
        assert collectives == 2 * 4
