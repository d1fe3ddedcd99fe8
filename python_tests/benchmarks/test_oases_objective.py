"""The published objective: against its formulas written out, and on the published times of RTX 3090."""

import json
from itertools import groupby

import pytest

from benchmarks.papers.oases_objective import PublishedTimes, best_degrees, from_published, main, objective
from oases.errors import UsageError
from oases.planner.chain import InfeasibleError
from oases.plans.gpt import gpt
from oases.plans.plan import read_plan
from oases.plans.shape import KINDS
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware_file import read_hardware

SMALL = PublishedTimes(
    forward={("attention", 1): 4.0, ("mlp", 1): 6.0, ("attention", 2): 2.0, ("mlp", 2): 3.0},
    backward={("attention", 1): 8.0, ("mlp", 1): 12.0, ("attention", 2): 4.0, ("mlp", 2): 6.0},
    all_reduce={1: 1.0, 2: 5.0},
    runtime_bytes={1: 10.0, 2: 20.0},
    samples={1: 1.0, 2: 2.0},
)


def test_two_layers_by_hand():
    # forward: f_0 4, i = 1: 6 + 4, i = 2: 4 + 6, then f_2 4 and c 1; backward: g_0 8, 18 + 12, 12 + 18, 12, 1.
    assert objective(SMALL, [1, 1, 1, 1]) == (4 + 10 + 10 + 4 + 1) + (8 + 30 + 30 + 12 + 1)
    # Degree 2: c hides the forward pass; backward i = 2: 6 + 9, its end 6. From 1 to 2: 2 x 1 + min(1, 2).
    assert objective(SMALL, [1, 1, 2, 2]) == (4 + 10 + 10 + 5 + 5) + (8 + 30 + 15 + 6 + 5) + 3
    # From 2 to 1: 2 x 1 + min(5, 8). Block 1 at degree 2: 5 + 5 forward, 9 + 6 backward.
    assert objective(SMALL, [2, 2, 1, 1]) == (2 + 10 + 10 + 4 + 1) + (4 + 15 + 30 + 12 + 1) + 7


def written_out(times: PublishedTimes, degrees: list[int]) -> float:
    """The formulas as they are printed."""
    n = len(degrees)
    total = 0.0
    for backward in (0.0, 1.0):

        def f(i: int, tp: int, backward: float = backward) -> float:
            return times.forward[KINDS[i % 2], tp] + backward * times.backward[KINDS[i % 2], tp]

        c = [times.all_reduce[tp] for tp in degrees]
        first = KINDS[0], degrees[0]
        total += times.backward[first] if backward else times.forward[first]
        total += sum(max(f(i, degrees[i]), c[i]) + max(f(i + 1, degrees[i]), c[i]) for i in range(1, n - 1))
        total += max(f(n - 2, degrees[n - 2]), c[n - 2]) + c[n - 1]
    return total


@pytest.mark.parametrize("blocks", [2, 4, 10])
@pytest.mark.parametrize("tp", [1, 2])
def test_uniform_degrees_follow_the_formulas(blocks, tp):
    assert objective(SMALL, [tp] * blocks) == written_out(SMALL, [tp] * blocks)


def _row(tp, batch, runtime, *times):
    names = ("attention_forward_ms", "attention_backward_ms", "mlp_forward_ms", "mlp_backward_ms", "all_reduce_ms")
    times = times or (1e3,) * 5  # rows of the whole batch are read for the runtime's memory alone
    return {
        "hidden": 3072,
        "tp": tp,
        "batch": batch,
        "runtime_memory_mib": runtime,
        **dict(zip(names, times, strict=True)),
    }


RTX_3090 = [
    # Published with the code of arXiv 2305.16121: one block on RTX 3090, sequence 1024, fp32.
    _row(2, 1, 252.06, 2.772, 4.685, 2.627, 5.356, 2.436),
    _row(2, 2, 342.05),
    _row(4, 2, 141.04, 2.864, 4.762, 2.656, 5.178, 5.03),
    _row(4, 4, 201.03),
    _row(8, 4, 96.0, 3.221, 5.065, 2.994, 5.46, 11.962),
    _row(8, 8, 192.0),
]
RTX_3090_BYTES = 24268 * 2**20
MODEL = gpt(3072, 24, 48, 1024)


def runs(degrees):
    return [(tp, len(list(group))) for tp, group in groupby(degrees)]


def test_eight_rtx_3090_mix_two_degrees():
    times = PublishedTimes.from_rows(RTX_3090, 3072, gpus=8, batch=8)
    assert times.degrees == (2, 4, 8)
    assert objective(times, [4] * 48) == pytest.approx(1.2043, abs=0.00005)
    known = best_degrees(times, MODEL, RTX_3090_BYTES, smaller_first=True)
    assert runs(known.states) == [(2, 14), (4, 34)]
    assert known.cost == pytest.approx(1.1506, abs=0.0001)
    assert known.binds
    free = best_degrees(times, MODEL, RTX_3090_BYTES)
    assert runs(free.states) == [(4, 34), (2, 14)]
    assert free.cost < known.cost
    for solution in (known, free):
        assert solution.cost == pytest.approx(objective(times, solution.states))


def test_with_memory_enough_the_best_plan_is_uniform():
    times = PublishedTimes.from_rows(RTX_3090, 3072, gpus=8, batch=8)
    assert runs(best_degrees(times, MODEL, 10 * RTX_3090_BYTES).states) == [(2, 48)]


def test_what_fits_nowhere_is_an_error():
    times = PublishedTimes.from_rows(RTX_3090, 3072, gpus=8, batch=8)
    with pytest.raises(InfeasibleError):
        best_degrees(times, MODEL, RTX_3090_BYTES / 10)


def test_degrees_without_rows_are_left_out():
    assert PublishedTimes.from_rows(RTX_3090[2:], 3072, gpus=8, batch=8).degrees == (4, 8)
    with pytest.raises(UsageError, match="no published times of hidden 1024"):
        PublishedTimes.from_rows(RTX_3090, 1024, gpus=8, batch=8)


GIVEN = ["--hidden", "256", "--heads", "4", "--layers", "2", "--sequence", "128", "--cluster", "4x3090"]


def test_the_script_writes_its_plan(capsys, tmp_path):
    path = tmp_path / "plan.json"
    main([*GIVEN, "--global-batch", "16", "--degrees", "1,2", "--json", str(path)])
    plan = read_plan(path)
    assert plan.micro_batches == 1
    for segment in plan.stages[0].segments:
        assert (segment.schedule, segment.sub_batches) == ("oases", 2)
        assert segment.recomputed_layers == (segment.num_blocks + 1) // 2
        assert segment.tp in (1, 2)
    for more, message in (
        (["--global-batch", "1"], "1 samples on 4 ranks leave no degree of 1, 2, 4 with 2 of them"),
        (["--global-batch", "16", "--memory", "2MiB"], "the lightest choice of states weighs"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*GIVEN, *more])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# --- tables of published times ---

ROW = {
    "hidden": 128, "tp": 2, "batch": 1, "attention_forward_ms": 2.0, "attention_backward_ms": 4.0,
    "mlp_forward_ms": 1.0, "mlp_backward_ms": 3.0, "all_reduce_ms": 1.0, "runtime_memory_mib": 10.0,
}  # fmt: skip


def published(**changes):
    rows = [
        ROW,
        ROW | {"batch": 2, "mlp_forward_ms": 1.9, "all_reduce_ms": 2.0},
        ROW | {"batch": 4, "mlp_forward_ms": None, "all_reduce_ms": None},
        ROW | {"tp": 1, "all_reduce_ms": 1.2},
    ]
    return {
        "sequence": 256, "dtype": "float32", "device": "RTX 3090 24 GiB", "gpus": 32, "gpus_per_server": 4,
        "rows": rows,
    } | changes  # fmt: skip


def test_published_times_are_converted(tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(published()))
    main(["--table", str(path), "--profile-to", str(tmp_path / "profile.json")])
    hardware = read_hardware(tmp_path / "profile.json")
    assert hardware == from_published(published(), "table")
    assert hardware.ranks_per_node == 4
    assert hardware.device.memory_bytes == 24 << 30
    assert len(hardware.blocks) == 7, "what did not fit is left out"
    first = hardware.blocks[0]
    assert (first.kind, first.heads, first.sequence, first.samples) == ("attention", 2, 256, 1)
    assert first.times == BlockTimes(0.002, 0.002, 0, 0.002, 0.002, 0, 0.004, 0)
    sample = hardware.cluster.samples[0]
    assert (sample.collective, sample.ranks, sample.bytes) == ("all_reduce", 32, 256 * 128 * 4)
    assert sample.seconds == pytest.approx(0.0011), "between 1.0 and 1.2 ms"
    model = ["--hidden", "128", "--heads", "2", "--layers", "2", "--sequence", "256"]
    main([*model, "--table", str(path), "--world", "4", "--global-batch", "4", "--degrees", "2"])
    assert "by the published objective" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "at least one row"),
        ({"rows": 3}, "at least one row"),
        ({"rows": [3]}, r"rows\[0\] must be an object"),
        ({"rows": [ROW | {"mlp_forward_ms": "3"}]}, r"rows\[0\]: mlp_forward_ms .* milliseconds"),
        ({"rows": [{"hidden": 128, "tp": 1, "batch": 1}]}, "'attention_forward_ms' is missing"),
        ({"rows": [ROW | {"all_reduce_ms": None}]}, "nothing can be planned"),
        ({"rows": [ROW, ROW]}, "two attention blocks"),
        ({"rows": [ROW | {"hidden": 200}]}, "hidden 200 in 3 heads over tp"),
        ({"dtype": []}, "dtype"),
        ({"device": "RTX 3090"}, "does not state its memory"),
        ({"gpus": 1}, "gpus must be at least 2"),
        ({"sequence": None}, "sequence must be a whole number"),
    ],
)
def test_published_mistakes(changes, message):
    with pytest.raises(UsageError, match=message):
        from_published(published(**changes), "table")


@pytest.mark.parametrize(
    ("name", "value"), [("hidden", 10**400), ("mlp_forward_ms", 10**400), ("mlp_forward_ms", 1e-320)]
)
def test_published_values_beyond_reason_are_named(name, value):
    times = {f"{kind}_{way}_ms": 1.0 for kind in ("attention", "mlp") for way in ("forward", "backward")}
    row = {"hidden": 64, "tp": 1, "batch": 1, **times, "all_reduce_ms": 1.0, name: value}
    head = {"sequence": 8, "dtype": "float32", "device": "RTX 3090 24 GiB", "gpus": 2, "gpus_per_server": 2}
    with pytest.raises(UsageError, match=rf"rows\[0\]: {name} must be"):
        from_published({**head, "rows": [row]}, "table")
