"""The generators against the paper's table: what is in flight while what is computed."""

import pytest
from block_examples import sums_per_layer

from oases.core.schedule import GENERATORS, ScheduleError, generate, oases, recomputed_layers, sync


def in_flight(schedule):
    """Per compute op, the all-reduces that were started and not yet waited for when it ran."""
    flying, seen = [], {}
    for op in schedule:
        if op.kind == "all_reduce":
            flying.append(str(op.carried))
        elif op.kind == "wait":
            flying.remove(str(op.carried))
        else:
            seen[str(op)] = list(flying)
    return seen


def test_sync_hides_nothing():
    assert all(not flying for flying in in_flight(sync(4, 2)).values())


def test_oases_keeps_one_all_reduce_of_another_sub_batch_in_flight():
    """Paper, forward table: A1(l) under AR(M2(l-1)); A2(l) under AR(A1(l)); M1 under AR(A2); M2 under AR(M1)."""
    seen = in_flight(oases(4, 2))
    assert seen["F 2.0"] == ["F 1.1"]
    assert seen["F 2.1"] == ["F 2.0"]
    assert seen["F 3.0"] == ["F 2.1"]
    assert seen["F 3.1"] == ["F 3.0"]
    # Backward, sub-batch 2 first: A2(u) under AR(dM1(u)), and so on.
    assert seen["B 2.1"] == ["B 3.0"]
    assert seen["B 2.0"] == ["B 2.1"]
    # Exposed: only the first block of each pass has nothing in flight.
    exposed = [op for op, flying in seen.items() if not flying and op[0] in "FB"]
    assert exposed == ["F 0.0", "B 3.1"]


def test_oases_recomputes_and_defers_while_the_gradient_is_in_flight():
    seen = in_flight(oases(4, 2, "full"))
    for block in range(3):
        for s in (0, 1):
            assert f"B {block + 1}.{s}" in seen[f"R {block}.{s}"], "recomputation needs no gradient"
    for block in range(4):
        for s in (0, 1):
            assert f"B {block}.{s}" in seen[f"W {block}.{s}"], "the next block needs no weight gradient"


def test_more_sub_batches_keep_more_in_flight():
    seen = in_flight(oases(4, 4))
    assert len(seen["F 2.0"]) == 3
    assert {flying[-1] for flying in seen["F 2.2"]} <= set("0123")


def test_all_reduces_per_layer_and_sub_batch():
    for name in ("sync", "oases"):
        assert sums_per_layer(generate(name, 6, 2)) == 4


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("layer_of", [(0, 1, 2, 3), (0, 0, 0, 1, 1, 1), (3, 5, 5, 6)])
def test_a_number_of_layers_means_those_that_layer_of_says(name, layer_of):
    layers = list(dict.fromkeys(layer_of))
    for count in range(len(layers) + 1):
        schedule = generate(name, len(layer_of), 2, count, layer_of)
        again = {block for block, layer in enumerate(layer_of) if layer in layers[:count]}
        assert schedule.recomputed_blocks == again
        assert recomputed_layers(schedule.recomputed_blocks, len(layer_of), layer_of) == count
    with pytest.raises(ScheduleError, match=f"a number of layers up to {len(layers)}"):
        generate(name, len(layer_of), 2, len(layers) + 1, layer_of)


def test_layers_of_other_blocks_are_refused():
    for layer_of in ((0, 0), (1, 0, 1, 0)):
        with pytest.raises(ScheduleError, match="each of the 4 blocks its layer, in order"):
            generate("oases", 4, 2, 1, layer_of)
