"""Blocks that send tokens to experts: their ops in any schedule, and what hides the all-to-alls."""

from itertools import pairwise

import pytest
from block_examples import sums_per_layer

from oases.core.schedule import (
    GENERATORS,
    Op,
    ScheduleError,
    along_sequence,
    format_schedule,
    generate,
    parse_schedule,
    sequence_parallel,
    validate,
)
from oases.plans.expert_schedules import exchanging
from oases.simulator import simulate


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("sub_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("blocks", [(1, 3), (0,), (0, 1, 2, 3)])
def test_every_sub_batch_in_three_pieces(name, sub_batches, blocks):
    whole = generate(name, 4, sub_batches)
    made = exchanging(whole, blocks)
    subs = range(whole.num_sub_batches)
    assert made.dispatched == {(b, s) for b in blocks for s in subs}
    assert set(whole.ops) < set(made.ops)
    added = [op for op in made if op not in set(whole.ops)]
    assert len(added) == 3 * 4 * len(made.dispatched), "an op, its all-to-all and its wait for D, E, BF and BE"
    lines = made.lines
    for b, s in made.dispatched:
        for pieces in (("D", "E", "F"), ("BF", "BE", "B")):
            chain = [Op(pieces[0], b, s)]
            for before, after in pairwise(pieces):
                chain += [Op("all_to_all", b, s, before), Op("wait", b, s, before), Op(after, b, s)]
            assert [lines[op] for op in chain] == sorted(lines[op] for op in chain)
    assert parse_schedule(format_schedule(made)) == made
    assert exchanging(made, blocks) is made
    assert sums_per_layer(made) == sums_per_layer(whole)
    assert [op for op in made.collectives if op.kind == "all_reduce"] != []


def test_what_stays_whole():
    recomputed = generate("oases", 4, 2, 1)  # layer 0, of blocks 0 and 1
    assert {b for b, _ in exchanging(recomputed, (1, 3)).dispatched} == {3}
    assert exchanging(generate("oases", 4, 2, "full"), (1, 3)).dispatched == frozenset()
    for other in (along_sequence(4, 2, (0, 2)), sequence_parallel(generate("oases", 4, 2))):
        assert exchanging(other, (1, 3)) is other
    plain = generate("oases", 4, 2)
    assert exchanging(plain, ()) is plain


@pytest.mark.parametrize("sub_batches", [2, 4])
def test_an_all_to_all_is_hidden_under_other_sub_batches(sub_batches):
    """Both all-to-alls of a sub-batch take as long as its experts: all but the first and the last is hidden."""
    seconds = {"F": 8.0, "B": 8.0, "W": 0.0, "C": 0.0, "all_reduce": 0.0, "all_to_all": 4.0}
    made = exchanging(generate("oases", 1, sub_batches), (0,))
    alone = exchanging(generate("fine_grained", 1, 1), (0,))
    assert simulate(alone, seconds).exposed(0) == pytest.approx(4 * 4.0)
    assert simulate(made, seconds).exposed(0) == pytest.approx(4 * 4.0), "of 4 all-to-alls for each sub-batch"
    made = exchanging(generate("oases", 2, sub_batches), (1,))
    order = [str(op) for op in made.forward if op.block == 1]
    assert order.index("E 1.0") < order.index("wait D 1.1")
    assert order.index("all_to_all D 1.1") < order.index("E 1.0"), "the next tokens travel under this one's experts"
    assert order.index("all_to_all E 1.0") < order.index("E 1.1")


@pytest.mark.parametrize(
    ("dropped", "why"),
    [
        ("wait D 0.1", "'wait D 0.1'"),
        ("E 0.0", "E 0.0"),
        ("all_to_all BE 0.1", "all_to_all BE 0.1"),
        ("BF 0.0", "BF 0.0"),
    ],
)
def test_a_list_without_a_piece_is_refused(dropped, why):
    text = format_schedule(exchanging(generate("oases", 1, 2), (0,)))
    assert f"\n{dropped}\n" in text
    with pytest.raises(ScheduleError, match=why):
        validate(parse_schedule(text.replace(f"\n{dropped}\n", "\n")))


def test_all_to_alls_carry_tokens_alone():
    text = format_schedule(generate("sync", 1, 1)).replace("all_reduce F 0.0", "all_to_all F 0.0")
    with pytest.raises(ScheduleError, match="only D, E, BF and BE produce tokens or their gradients"):
        validate(parse_schedule(text))
