"""Layers whose quantised sums are too wrong: rotated, or in bfloat16, from the same collective on, on all ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist

import oases
from oases.core.execution.communication import add_wire
from oases.core.execution.group import scheduler_of
from oases.kernels.quantized import dequantize, quantize

WIRE = "int4:rotated"
"""With it, layers are sent in bfloat16 at once; with int4 they are rotated first."""
CALLS = 61 + 3
"""One in 61 collectives of a layer is measured, and three samples in succession have to be too wrong."""


def outliers(*shape):
    """Numbers of which int4 keeps one in a block of 128, unless they are rotated; equal on all ranks."""
    x = torch.full(shape, 0.49)
    x.view(-1)[::128] = 7.0
    return x


def hard(*shape):
    """Numbers that are such when they are rotated, and only then."""
    packed = quantize(outliers(*shape).view(-1), "int8")
    return dequantize(packed, outliers(*shape).numel(), "int8:rotated").view(shape)


def easy(*shape):
    """Numbers whose relative error in int4 is far below the limit; that of normal ones is close to it."""
    return 1 + torch.rand(*shape)


def collective(scheduler, kind, label, x, wire=WIRE):
    """Result of a collective of x [ranks, n], and the exact one."""
    size = dist.get_world_size()
    if kind == "all_reduce":
        y = x.clone()
        ticket, exact = scheduler.all_reduce(y, label, wire=wire), size * x
    elif kind == "reduce_scatter":
        y = torch.empty_like(x[0])
        ticket, exact = scheduler.reduce_scatter(y, x, label, wire), size * x[dist.get_rank()]
    elif kind == "all_gather":
        y = x.new_empty(size, *x.shape)
        ticket, exact = scheduler.all_gather(y, x, label, wire), x.expand(size, *x.shape)
    else:
        y = torch.empty_like(x)
        ticket = scheduler.all_to_all(y, x, [1] * size, [1] * size, label, wire)
        exact = x[dist.get_rank()].expand_as(y)
    scheduler.wait(ticket)
    return y, exact


def relative(y, exact):
    return float((y - exact).norm() / exact.norm())


def check_exempted(kind):
    """Number of the call after which the ops of a layer were exempted; those of another layer never were."""
    scheduler, x = scheduler_of(dist.group.WORLD), hard(2, 640)
    add_wire(dist.group.WORLD, WIRE)
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
        assert text.startswith(f"the relative error of {where} stayed above 0.25: 0.")
        assert "it is sent in bfloat16 from now on" in text
    for _ in range(CALLS):
        collective(scheduler, kind, f"F 5.0 (stack 77, layer 2, {kind})", easy(2, 640))
    assert f"F 5 (stack 77, layer 2, {kind})" not in scheduler.exempted()
    found = oases.report()
    assert found.exempted[where] == scheduler.exempted()[where] == found.json()["exempted"][where]
    line = next(line for line in str(found).splitlines() if line.startswith(where))
    assert "sent in bfloat16, since its relative error stayed above 0.25 (" in line
    totals = [scheduler.totals()[label] for label in labels]
    packed = 2 * (1280 if kind == "all_gather" else 640)
    quantised, exempt = packed // 128 * 68, packed // 128 * 260
    later = CALLS + 10 - (at + 1)
    assert sum(each.bytes for each in totals) == (at + 1) * quantised + later * exempt
    assert sum(each.saved_bytes for each in totals) == (at + 1) * (4 * packed - quantised) + later * (
        4 * packed - exempt
    )
    return at


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_ranks_exempt_a_layer_at_the_same_call(two_ranks, kind):
    first, second = two_ranks.run(check_exempted, kind)
    assert first == second


def check_rotated():
    """Numbers of the call after which outliers were rotated, and after which what is wrong both ways was exempted."""
    scheduler, x = scheduler_of(dist.group.WORLD), outliers(2, 640)
    both = torch.where(torch.arange(1280).view(2, 640) // 128 % 2 == 0, x, hard(2, 640))
    add_wire(dist.group.WORLD, "int4")
    scheduler.reset_totals()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        errors = [relative(*collective(scheduler, "all_reduce", "outliers", x, "int4")) for _ in range(2 * CALLS)]
        wrong = [relative(*collective(scheduler, "all_reduce", "both", both, "int4")) for _ in range(CALLS + 10)]
    rotated, exempted = (next(at for at, error in enumerate(each) if error < 0.25) for each in (errors, wrong))
    assert min(errors[:rotated]) > 0.5
    assert max(errors[rotated:]) < 0.2
    assert scheduler.totals()["outliers"].bytes == 2 * CALLS * (1280 // 128 * 68)
    assert max(wrong[exempted:]) < 2**-8
    assert {"outliers", "both"} & set(scheduler.exempted()) == {"both"}
    mine = [str(each.message) for each in said if "relative error" in str(each.message)]
    of = ("outliers", "both", "both") if dist.get_rank() == 0 else ()
    then = ("its blocks are rotated", "its blocks are rotated", "it is sent in bfloat16")
    assert len(mine) == len(of)
    for text, layer, way in zip(mine, of, then, strict=False):
        assert text.startswith(f"the relative error of {layer} stayed above 0.25: 0.")
        assert f"; {way} from now on" in text
    return rotated, exempted


def test_layers_with_outliers_are_rotated_first(two_ranks):
    first, second = two_ranks.run(check_rotated)
    assert first == second


def test_four_ranks(four_ranks):
    assert len(set(four_ranks.run(check_four))) == 1


def check_four():
    scheduler, x = scheduler_of(dist.group.WORLD), hard(4, 640)
    add_wire(dist.group.WORLD, WIRE)
    for call in range(CALLS):
        collective(scheduler, "all_reduce", "sums of four", x)
        if "sums of four" in scheduler.exempted():
            return call
    raise AssertionError("nothing was exempted")


def check_not_exempted():
    scheduler, x = scheduler_of(dist.group.WORLD), hard(2, 640)
    add_wire(dist.group.WORLD, WIRE)
    residual = torch.zeros_like(x)
    for call in range(CALLS):
        scheduler.wait(scheduler.all_reduce(x.clone(), "fed back", wire=WIRE, residual=residual))
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
