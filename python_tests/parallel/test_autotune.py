"""schedule="auto": candidates take turns, the fastest stays, ranks agree, the choice is kept; overlap required."""

import json

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, compare, make_stack, plain_blocks

from oases.errors import OverlapError
from oases.parallel import autotune
from oases.parallel.autotune import Autotune, candidates, labelled
from oases.schedule import generate


def names(schedules):
    return [(s.name, s.num_sub_batches) for s in schedules]


def test_candidates():
    assert names(candidates(4, 8, "auto", "auto", "full")) == [("fine_grained", 1)] + [
        ("oases", s) for s in (2, 4, 8)
    ]
    assert ("cross_pass", 2) in names(candidates(4, 8, "auto", "auto", "none"))
    assert names(candidates(4, 3, "oases", "auto", "none")) == [("oases", 2)]
    assert names(candidates(4, 1, "oases", "auto", "none")) == [("oases", 1)]
    assert names(candidates(4, 8, "auto", 2, "full")) == [("fine_grained", 1), ("oases", 2)]


def choose(path, seconds):
    """Feed times by hand: what is chosen depends on them alone. seconds[rank][candidate]."""
    autotune.cache_path = lambda: path
    schedules = [generate("fine_grained", 2, 1), generate("oases", 2, 2), generate("oases", 2, 4)]
    tuning = Autotune(labelled(schedules), dist.group.WORLD, "key", has_off=True)
    begun_with = tuning.choice
    turns = []
    while tuning.choice is None:
        index = schedules.index(tuning.current)
        turns.append(index)
        tuning.note(seconds[dist.get_rank()][index])
    return begun_with and names([begun_with]), turns, names([tuning.choice])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([[1.0, 0.8, 0.9], [1.0, 0.8, 0.9]], ("oases", 2)),
        ([[1.0, 0.8, 0.9], [1.0, 1.2, 0.9]], ("oases", 4)),  # the slowest rank counts
        ([[1.0, 0.99, 1.1], [1.0, 0.99, 1.1]], ("fine_grained", 1)),  # not worth it: off
    ],
)
def test_the_fastest_on_the_slowest_rank_is_chosen_and_kept(two_ranks, tmp_path, seconds, chosen):
    path = tmp_path / "cache" / "schedules.json"
    for begun_with, turns, choice in two_ranks.run(choose, path, seconds):
        assert begun_with is None
        assert turns == [0, 1, 2] * (autotune.ROUNDS + 1)
        assert choice == [chosen]
    assert json.loads(path.read_text()) == {"key": f"{chosen[0]} {chosen[1]}"}
    for begun_with, turns, _ in two_ranks.run(choose, path, seconds):
        assert (begun_with, turns) == ([chosen], [])


def check_exact_while_choosing(path):
    autotune.cache_path = lambda: path
    blocks = plain_blocks(2)
    stack = make_stack(blocks, dist.group.WORLD, schedule="auto", sub_batches="auto")
    x, grad = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
    steps = 0
    while next(iter(stack._tunings.values())).choice is None if stack._tunings else True:
        compare(stack, blocks, dist.group.WORLD, x, grad)
        steps += 1
    with torch.no_grad():
        stack(x)
    return steps, stack.schedule.name


def test_gradients_are_exact_while_choosing(two_ranks, tmp_path):
    (steps, first), (_, second) = two_ranks.run(check_exact_while_choosing, tmp_path / "s.json")
    assert steps == 5 * (autotune.ROUNDS + 1)
    assert first == second


def test_a_broken_cache_is_measured_anew(two_ranks, tmp_path):
    path = tmp_path / "schedules.json"
    path.write_text("[1, 2")
    for begun_with, _, _ in two_ranks.run(choose, path, [[1.0, 0.5, 0.9]] * 2):
        assert begun_with is None


def check_required():
    blocks = plain_blocks(2)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(OverlapError, match="schedule 'sync' with 1 sub-batches overlaps nothing"):
        make_stack(blocks, dist.group.WORLD, schedule="sync", require_overlap=True)(x)
    with pytest.raises(OverlapError, match="schedule 'sub_pipelined' with 1 sub-batches"):
        make_stack(blocks, dist.group.WORLD, schedule="sub_pipelined", sub_batches=1, require_overlap=True)(x)
    make_stack(blocks, dist.group.WORLD, require_overlap=True)(x)


def test_required_overlap_that_cannot_be_is_an_error(two_ranks, monkeypatch):
    two_ranks.run(check_required)
    monkeypatch.setenv("OASES_REQUIRE_OVERLAP", "1")
    with pytest.raises(OverlapError, match="the group has one rank"):
        make_stack(plain_blocks(1), None)(torch.randn(4, 3, WIDTH, dtype=torch.float64))


def check_wire_dtype():
    blocks = plain_blocks(4, torch.float32)
    x, grad = torch.randn(2, 4, 3, WIDTH)
    results = []
    for wire in (None, torch.bfloat16):
        stack = make_stack(blocks, dist.group.WORLD, wire_dtype=wire, recompute="full", schedule="cross_pass")
        from oases import report
        from oases.execution.group import scheduler_of

        scheduler_of(dist.group.WORLD).reset_totals()
        mine = x.clone().requires_grad_()
        y = stack(mine)
        y.backward(grad)
        results.append((y.detach(), mine.grad, report().stacks[0].bytes))
    (y, x_grad, size), (narrow_y, narrow_grad, narrow_size) = results
    assert narrow_size * 2 == size
    assert not torch.equal(y, narrow_y)
    torch.testing.assert_close(narrow_y, y, rtol=0.02, atol=0.05)
    torch.testing.assert_close(narrow_grad, x_grad, rtol=0.05, atol=0.1)


def test_wire_dtype_halves_the_bytes(two_ranks):
    two_ranks.run(check_wire_dtype)


def test_wire_dtype_must_be_floating():
    with pytest.raises(ValueError, match="wire_dtype must be a floating-point type"):
        make_stack(plain_blocks(1), None, wire_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"such as torch.bfloat16, got 'bfloat16'"):
        make_stack(plain_blocks(1), None, wire_dtype="bfloat16")
