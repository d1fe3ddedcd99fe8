"""Hardware: which link a group needs, block times between the measured sizes, and by rates where none were."""

from dataclasses import fields, replace

import pytest

from oases.core.schedule import generate
from oases.errors import UsageError
from oases.plans.gpt import gpt, kind_called, resized
from oases.plans.shape import KINDS
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead, merge, stack_costs
from oases.simulator.links import LinkModel

MODEL = gpt(64, 4, 4, 32)
UNIT = BlockTimes(*[1.0] * len(fields(BlockTimes)))
DEVICE = Device("box", 1 << 30, {"float32": 1e12}, 1e11)


def block(kind, samples, seconds, tp=2):
    return MeasuredBlock(kind, 64, 4, 32, "float32", tp, samples, UNIT.scaled(seconds))


BLOCKS = tuple(block(kind, samples, 1.0 + samples) for kind in KINDS for samples in (1.0, 2.0, 4.0))
HARDWARE = Hardware("h", DEVICE, 4, LinkModel(0, 1e10), LinkModel(0, 1e9), BLOCKS)


def test_links_by_degree_and_stride():
    assert HARDWARE.link_of(4) == "node"
    assert HARDWARE.link_of(8) == HARDWARE.link_of(2, stride=4) == "cluster"
    inside, across = (HARDWARE.collective_seconds("send", n, 1e9) for n in (2, 8))
    assert across == pytest.approx(10 * inside)
    shared = HARDWARE.collective_seconds("send", 2, 1e9, stride=4)
    assert shared == pytest.approx(4 * across), "four groups share the node's link"


def test_measured_sizes_and_between_and_beyond():
    def at(samples):
        return HARDWARE.block_times(MODEL, kind_called("mlp"), 2, samples).forward

    assert [at(s) for s in (1, 2, 3, 4)] == [2, 3, 4, 5]
    assert at(8) == 9
    assert at(0.5) == 1.5
    steep = replace(HARDWARE, blocks=(block("mlp", 1.0, 1.0), block("mlp", 2.0, 10.0)))
    assert steep.block_times(MODEL, kind_called("mlp"), 2, 0.5).forward == 0.125, "a quarter of what is proportional"
    single = replace(HARDWARE, blocks=BLOCKS[:1])
    assert single.block_times(MODEL, kind_called("attention"), 2, 3).forward == 6


def test_shapes_that_were_not_measured_are_named():
    assert HARDWARE.has_block(MODEL, 2)
    assert not HARDWARE.has_block(MODEL, 4)
    with pytest.raises(UsageError, match=r"no mlp block of hidden 64.*tp 4; it holds hidden 64.*oases profile"):
        HARDWARE.block_times(MODEL, kind_called("mlp"), 4, 1)


def test_rates_stand_in_where_nothing_was_measured():
    plain = replace(HARDWARE, blocks=())
    big = gpt(4096, 2, 32, 1024)
    whole, half = (plain.block_times(big, kind_called("mlp"), tp, 4) for tp in (1, 2))
    assert whole.forward > 16 * 4 * 1024 * 4096**2 / 1e12
    assert 0.5 < half.forward / whole.forward < 0.6
    assert whole.recompute < whole.recompute_whole
    with pytest.raises(UsageError, match="holds no bfloat16; it holds float32"):
        plain.block_times(resized(big, dtype="bfloat16"), kind_called("mlp"), 1, 1)


def overhead(sub_batches, samples, seconds):
    return MeasuredOverhead(64, 4, 32, "float32", 2, 2, samples, sub_batches, seconds, 2 * seconds)


def test_overhead_of_the_nearest_measurement_grows_with_the_layers():
    hardware = replace(HARDWARE, overheads=(overhead(1, 8.0, 1.0), overhead(2, 8.0, 2.0), overhead(2, 4.0, 3.0)))
    assert hardware.pass_overhead(MODEL, 2, 8, 2) == (4, 8), "four layers, and two were measured"
    assert hardware.pass_overhead(MODEL, 2, 4, 4, layers=2) == (3, 6)
    assert hardware.pass_overhead(MODEL, 2, 8, 1, layers=1) == (0.5, 1)
    assert hardware.pass_overhead(MODEL, 4, 8, 2) == (0, 0)


@pytest.mark.parametrize("packing", [1e9, 0.0])
def test_halves_of_a_quantised_sum_pack_half_as_much(packing):
    """A reduce-scatter and an all-gather quantise and read back what an all-reduce does."""
    free = LinkModel(0, 1e30)
    hardware = replace(HARDWARE, device=replace(DEVICE, packing_bytes_per_second=packing), node=free)
    costs = stack_costs(hardware, MODEL, MODEL.layer_kinds[0], 2, 2, generate("sync", 2, 1), "int8")
    whole, *halves = (costs.collectives[name] for name in ("all_reduce", "reduce_scatter", "all_gather"))
    assert whole > 0
    assert sum(halves) == pytest.approx(whole)


def test_merged_profiles_keep_the_newer_of_what_both_have():
    newer = replace(HARDWARE, blocks=(block("mlp", 1.0, 9.0), block("mlp", 1.0, 7.0, tp=4)), date="2026-02-02")
    merged = merge(HARDWARE, newer)
    assert len(merged.blocks) == len(BLOCKS) + 1
    assert merged.block_times(MODEL, kind_called("mlp"), 2, 1).forward == 9
    assert merged.block_times(MODEL, kind_called("attention"), 2, 1).forward == 2
    assert merged.date == "2026-02-02"
    with pytest.raises(UsageError, match="of device 'box', but this is 'other'"):
        merge(HARDWARE, replace(newer, device=replace(DEVICE, name="other")))
