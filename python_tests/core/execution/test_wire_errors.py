"""Layers whose quantised sums are too wrong: in bfloat16, from the same collective on, on all ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist

import oases
from oases.core.execution.communication import add_wire
from oases.core.execution.group import scheduler_of

CALLS = 61 + 3
"""One in 61 collectives of a layer is measured, and three samples in succession have to be too wrong."""


def hard(*shape):
    """Numbers of which int8 keeps one in a block of 128, the one that cancels in the sum over the ranks."""
    x = torch.full(shape, 0.49)
    x.view(-1)[::128] = 127.0 * (-1) ** dist.get_rank()
    return x


def easy(*shape):
    """Numbers whose relative error is far below the limit."""
    return 1 + torch.rand(*shape)


def collective(scheduler, kind, label, x):
    """Result of a collective of x [ranks, n], and the exact one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(everyone, x)
    exact = torch.stack(everyone)
    if kind == "all_reduce":
        y = x.clone()
        ticket, exact = scheduler.all_reduce(y, label, wire="int8"), exact.sum(0)
    elif kind == "reduce_scatter":
        y = torch.empty_like(x[0])
        ticket, exact = scheduler.reduce_scatter(y, x, label, "int8"), exact.sum(0)[rank]
    elif kind == "all_gather":
        y = x.new_empty(size, *x.shape)
        ticket = scheduler.all_gather(y, x, label, "int8")
    else:
        y = torch.empty_like(x)
        ticket, exact = scheduler.all_to_all(y, x, [1] * size, [1] * size, label, "int8"), exact[:, rank]
    scheduler.wait(ticket)
    return y, exact


def relative(y, exact):
    return float((y - exact).norm() / exact.norm())


def check_exempted(kind):
    """Number of the call after which the ops of a layer were exempted; those of another layer never were."""
    scheduler, x = scheduler_of(dist.group.WORLD), hard(2, 640)
    add_wire(dist.group.WORLD)
    scheduler.reset_totals()
    where = f"F 4 (stack 77, layer 2, {kind})"
    labels = [where.replace("4", f"4.{sub_batch}", 1) for sub_batch in (0, 1)]
    at, errors = None, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in range(CALLS + 10):
            errors.append(relative(*collective(scheduler, kind, labels[call % 2], x)))
            if at is None and where in scheduler.exempted():
                at = call
    assert at is not None
    assert min(errors[: at + 1]) > 0.25
    assert max(errors[at + 1 :]) < 2**-8
    mine = [str(each.message) for each in said if "relative error" in str(each.message)]
    assert len(mine) == (dist.get_rank() == 0)
    for text in mine:
        assert text.startswith(f"the relative error of {where} stayed above 0.25: ")
        assert "it is sent in bfloat16 from now on" in text
    for _ in range(CALLS):
        collective(scheduler, kind, f"F 5.0 (stack 77, layer 2, {kind})", easy(2, 640))
    assert f"F 5 (stack 77, layer 2, {kind})" not in scheduler.exempted()
    found = oases.report()
    assert found.exempted[where] == scheduler.exempted()[where] == found.json()["exempted"][where]
    line = next(line for line in str(found).splitlines() if line.startswith(where))
    assert "sent in bfloat16, since its relative error stayed above 0.25 (" in line
    totals = [scheduler.totals()[label] for label in labels]
    quantised, exempt = 1280 // 128 * 132, 2 * 1280
    later = CALLS + 10 - (at + 1)
    assert sum(each.bytes for each in totals) == (at + 1) * quantised + later * exempt
    saved = (at + 1) * (4 * 1280 - quantised) + later * (4 * 1280 - exempt)
    assert sum(each.saved_bytes for each in totals) == saved
    return at


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_ranks_exempt_a_layer_at_the_same_call(two_ranks, kind):
    first, second = two_ranks.run(check_exempted, kind)
    assert first == second


def check_moved(kind):
    """Errors of what is not summed have a bound: it stays quantised, of the hardest numbers, too."""
    scheduler, x = scheduler_of(dist.group.WORLD), hard(2, 640)
    add_wire(dist.group.WORLD)
    errors = [relative(*collective(scheduler, kind, f"moved by {kind}", x)) for _ in range(CALLS + 10)]
    assert max(errors) < 0.05
    assert f"moved by {kind}" not in scheduler.exempted()
    assert scheduler.errors()[f"moved by {kind}"][0] >= 1


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_what_is_not_summed_is_not_exempted(two_ranks, kind):
    two_ranks.run(check_moved, kind)


def check_shared_label():
    """A layer's sums are exempted, whatever its all-gathers of the same label measure in between."""
    scheduler, x = scheduler_of(dist.group.WORLD), hard(2, 640)
    add_wire(dist.group.WORLD)
    for call in range(2 * CALLS):
        collective(scheduler, ("reduce_scatter", "all_gather")[call % 2], "both ways", x)
    assert "both ways" in scheduler.exempted()
    assert relative(*collective(scheduler, "reduce_scatter", "both ways", x)) < 2**-8
    assert 2**-8 < relative(*collective(scheduler, "all_gather", "both ways", x)) < 0.05


def test_a_label_of_sums_and_others(two_ranks):
    two_ranks.run(check_shared_label)


def test_four_ranks(four_ranks):
    assert len(set(four_ranks.run(check_four))) == 1


def check_four():
    scheduler, x = scheduler_of(dist.group.WORLD), hard(4, 640)
    add_wire(dist.group.WORLD)
    for call in range(CALLS):
        collective(scheduler, "all_reduce", "sums of four", x)
        if "sums of four" in scheduler.exempted():
            return call
    raise AssertionError("nothing was exempted")


def check_not_exempted():
    scheduler, x = scheduler_of(dist.group.WORLD), hard(2, 640)
    add_wire(dist.group.WORLD)
    residual = torch.zeros_like(x)
    for call in range(CALLS):
        scheduler.wait(scheduler.all_reduce(x.clone(), "fed back", wire="int8", residual=residual))
        bad = x.clone()
        bad[0, 3] = float("nan")
        y, _ = collective(scheduler, "all_reduce", "with a NaN", bad)
        assert bool(y[0, :128].isnan().all())
        # Too wrong at every other sample alone: a sample of the same layer in between is exact.
        collective(scheduler, "all_reduce", "now and then", x if call % 2 else torch.zeros_like(x))
    assert not {"fed back", "with a NaN", "now and then"} & set(scheduler.exempted())
    assert scheduler.errors()["fed back"][0] >= 1
    assert "with a NaN" not in scheduler.errors()


def test_what_is_not_exempted(two_ranks):
    two_ranks.run(check_not_exempted)
