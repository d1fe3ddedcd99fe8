"""schedule="auto": candidates take turns, the fastest stays, ranks agree, the choice is kept; overlap required."""

import copy
import json
import random

import pytest
import torch
import torch.distributed as dist
from auto_choice import measuring
from block_examples import WIDTH, compare, make_stack, plain_blocks

from oases import OverlappedColumnLinear
from oases.core.blocks.chooser import Chooser, bucket_of, candidates, labelled, waves_of
from oases.core.execution import autotune
from oases.core.execution.autotune import Autotune
from oases.core.schedule import generate
from oases.errors import OverlapError, UsageError


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
    tuning = Autotune(labelled(schedules), dist.group.WORLD, "key", has_off=True, waves=waves_of(schedules))
    turns = []
    while tuning.choice is None:
        index = schedules.index(tuning.current.schedule)
        turns.append(index)
        tuning.begin_turn().note(seconds[dist.get_rank()][index])
    return sum(map(len, tuning.times.values())), turns, names([tuning.choice.schedule])


@pytest.mark.parametrize(
    ("seconds", "chosen", "turns"),
    [
        # After a warm-up and n rounds, those (25 / n) % slower than the fastest drop out.
        ([[1.0, 0.7, 0.8], [1.0, 0.7, 0.8]], ("oases", 2), [0, 1] * 2 + [2] * 2 + [1, 2]),
        ([[1.0, 0.5, 0.7], [1.0, 0.9, 0.7]], ("oases", 4), [0, 1] * 2 + [2] * 2),  # the slowest rank counts
        (
            [[1.0, 0.99, 1.1], [1.0, 0.99, 1.1]],
            ("fine_grained", 1),
            [0, 1] * 2 + [2] * 2 + [0, 1, 2] * 2 + [0, 1] * 13,
        ),
        ([[1.0, 0.99, 1.3], [1.0, 0.99, 1.0]], ("fine_grained", 1), [0, 1] * 2 + [2] * 2 + [0, 1] * 15),
        ([[1.0, 1.3, 0.5], [1.0, 1.3, 0.5]], ("fine_grained", 1), [0, 1] * 2),  # more sub-batches are not tried
    ],
)
def test_the_fastest_on_the_slowest_rank_is_chosen_and_repeated(two_ranks, tmp_path, seconds, chosen, turns):
    path = tmp_path / "cache" / "schedules.json"
    assert two_ranks.run(choose, path, seconds) == [(len(turns), turns, [chosen])] * 2
    kept = {"turns": "".join(map(str, turns)), "chosen": f"{chosen[0]} {chosen[1]}"}
    assert json.loads(path.read_text()) == {"key": kept}
    # A later run measures nothing, whatever its times, and has the same turns.
    assert two_ranks.run(choose, path, [[1.0] * 3] * 2) == [(0, turns, [chosen])] * 2
    path.write_text(json.dumps({"key": kept["chosen"]}))
    assert two_ranks.run(choose, path, seconds) == [(0, [], [chosen])] * 2


def test_calls_in_flight_are_counted_for_their_own_candidates(monkeypatch):
    """A pipeline begins several calls before the first of them ends."""
    monkeypatch.setattr(autotune, "group_size", lambda group: 2)
    monkeypatch.setattr(autotune, "all_gather_objects", lambda mine, group: [mine])
    tuning = Autotune({"off": 1, "on": 2, "more": 4}, None, "", has_off=True, keep=False)
    seconds = {"off": 1.0, "on": 0.9, "more": 0.88}
    flying = [tuning.begin_turn() for _ in range(3)]
    steps = 0
    while tuning.choice is None:
        flying.append(tuning.begin_turn())
        turn = flying.pop(0)
        turn.note(seconds[turn.label])
        steps += 1
    assert tuning.chosen == "more"
    assert steps <= len(seconds) * (tuning.rounds + 1) + 3
    assert {label: set(times) for label, times in tuning.times.items()} == {k: {v} for k, v in seconds.items()}


@pytest.mark.parametrize(
    ("of_each", "chosen"),
    [
        ((1.9, 1.12, 1.05, 1.2, 1.1, 1.0, 1.02), "f"),  # a measured cell where communication takes as long as compute
        ((1.0, 1.4, 1.5, 2.2, 2.4, 3.8, 4.2), "a"),  # a tiny model: each cut costs more than all communication
        ((1.0, 1.2, 1.25, 1.5, 1.6, 3.0, 3.0), "a"),
        ((3.0, 1.0, 1.04, 1.2, 1.25, 2.0, 2.0), "b"),
        ((1.0,) * 7, "a"),
    ],
)
def test_choosing_costs_less_than_a_percent_of_a_thousand_steps(monkeypatch, of_each, chosen):
    """Candidates are off and two each of 2, 4 and 8 sub-batches; the percent is of the time of the best."""
    monkeypatch.setattr(autotune, "group_size", lambda group: 2)
    monkeypatch.setattr(autotune, "all_gather_objects", lambda mine, group: [mine])
    waves = ["abc", "de", "fg"]
    seconds = dict(zip("abcdefg", of_each, strict=True))
    tuning = Autotune(dict.fromkeys(seconds, 0), None, "", has_off=True, keep=False, waves=waves)
    excess = 0.0
    while tuning.choice is None:
        excess += seconds[tuning.turn] - min(of_each)
        tuning.begin_turn().note(seconds[tuning.turn])
    assert tuning.chosen == chosen
    assert excess < 0.01 * 1000 * min(of_each)


@pytest.mark.parametrize(
    ("of_each", "noise", "most_off", "within"),
    [
        ((1.0, 1.25, 1.25, 1.8, 1.8, 3.0, 3.0), 0.45, 0.1, 1.0),  # a step of 20 ms: turns differ by half
        ((1.0, 1.25, 1.25, 1.8, 1.8, 3.0, 3.0), 0.1, 0.0, 1.0),
        ((1.4, 1.0, 1.05, 1.02, 1.05, 1.2, 1.2), 0.07, 1.0, 1.051),  # a second: turns differ by a few percent
        ((1.4, 1.1, 1.1, 1.0, 1.1, 1.1, 1.1), 0.05, 1.0, 1.02),
        ((1.15, 1.0, 1.02, 1.1, 1.1, 1.3, 1.3), 0.07, 1.0, 1.021),
    ],
)
def test_noise_does_not_choose(monkeypatch, of_each, noise, most_off, within):
    """Shares of 200 seeds: few choose what overlaps where that is slower, most what is nearly the fastest."""
    monkeypatch.setattr(autotune, "group_size", lambda group: 2)
    monkeypatch.setattr(autotune, "all_gather_objects", lambda mine, group: [mine])
    seconds = dict(zip("abcdefg", of_each, strict=True))
    wrong, near, excess = 0, 0, []
    for seed in range(200):
        draw = random.Random(seed)
        tuning = Autotune(dict.fromkeys(seconds, 0), None, "", has_off=True, keep=False, waves=["abc", "de", "fg"])
        lost = 0.0
        while tuning.choice is None:
            lost += seconds[tuning.turn] / min(of_each) - 1
            tuning.begin_turn().note(seconds[tuning.turn] * draw.lognormvariate(0, noise))
        excess.append(lost)
        wrong += tuning.chosen != "a"
        near += seconds[tuning.chosen] <= within * min(of_each)
    assert wrong <= most_off * 200
    assert near >= 0.9 * 200
    assert sorted(excess)[190] < 10, "steps: a percent of a thousand"


def test_spread_is_what_neither_candidate_nor_round_explains():
    assert autotune.spread([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) == pytest.approx(0.0)
    draw = random.Random(1)
    turns = [[level * draw.lognormvariate(0, 0.2) for _ in range(200)] for level in (1.0, 3.0, 0.5)]
    assert autotune.spread(turns) == pytest.approx(0.2, rel=0.1)
    assert autotune.spread([[1.0, 2.0]]) == autotune.spread([[1.0], [2.0]]) == 0.0


@pytest.mark.parametrize("lengths", [range(1, 2000), [10**6, 10, 3000] * 700])
def test_choosing_for_many_shapes_costs_no_more(monkeypatch, tmp_path, lengths):
    """Every power of two of the length is another shape; candidates but the best take 1.5 times as long."""
    monkeypatch.setattr(autotune, "group_size", lambda group: 2)
    monkeypatch.setattr(autotune, "group_rank", lambda group: 0)
    monkeypatch.setattr(autotune, "cache_path", lambda: tmp_path / "s.json")
    monkeypatch.setattr(autotune, "all_gather_objects", lambda mine, group: [mine])
    monkeypatch.setattr(autotune.dist, "broadcast_object_list", lambda found, group, group_src: None)
    found = Chooser([torch.nn.Identity()] * 2, "auto")
    lost, draw = 0.0, random.Random(0)
    for length in lengths:
        x = torch.empty(4, length, 8, device="meta")
        tuning = found.tuning_of(x, (), (), list, None, "")
        if tuning.choice is None:
            turn = tuning.begin_turn()
            slower = 1.0 if turn.label == "cross_pass 2" else 1.5
            turn.note(slower * draw.uniform(1, 1.05))
            lost += slower - 1
    assert lost < 10  # steps: a percent of a thousand
    assert tuning.chosen in ("cross_pass 2", "oases 2")


def test_shapes_that_share_a_choice():
    assert bucket_of((6, 200, 768)) == bucket_of((4, 256, 768)) == bucket_of((7, 129, 768)) == (4, 256, 768)
    assert bucket_of((8, 257, 768)) == (8, 512, 768)
    assert bucket_of((1, 5)) == (1, 5)
    assert bucket_of((3,)) == (2,)
    assert bucket_of((0, 1, 4)) == (1, 1, 4)


def check_exact_while_choosing(path):
    blocks = plain_blocks(2)
    with measuring(path):
        stack = make_stack(blocks, dist.group.WORLD, schedule="auto")
        x, grad = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            stack(x)
        asked = stack.schedule.name, stack.schedule.num_sub_batches
        steps = 0
        while "@" in next(iter(stack.chooser.choices.values()), "@"):
            compare(stack, blocks, dist.group.WORLD, x, grad)
            steps += 1
        with torch.no_grad():
            stack(x)
        copied = copy.deepcopy(stack)
    return asked, steps, stack.schedule.name, copied.chooser.choices == stack.chooser.choices


def test_gradients_are_exact_while_choosing(two_ranks, tmp_path):
    (asked, steps, first, copied), (_, _, second, _) = two_ranks.run(check_exact_while_choosing, tmp_path / "s.json")
    assert asked == ("oases", 2)  # what is not measured overlaps
    assert 2 * 3 <= steps <= 5 * (autotune.ROUNDS + 1)
    assert first == second
    assert copied


def outputs(path, steps, cuts=()):
    """Outputs and gradients of every step; at `cuts` a new stack goes on with the kept choices."""
    blocks = plain_blocks(2)
    x, grad = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
    found = []
    with measuring(path):
        stack = make_stack(blocks, dist.group.WORLD, schedule="auto")
        for step in range(steps):
            if step in cuts:
                kept, calls = stack.chooser.choices, stack.calls
                stack = make_stack(blocks, dist.group.WORLD, schedule="auto")
                stack.chooser.choices = kept
                stack.at_call(calls)
            mine = x.clone().requires_grad_()
            y = stack(mine)
            y.backward(grad)
            found.append((y.detach(), mine.grad, stack.schedule.num_sub_batches))
    return found, stack.chooser.choices


@pytest.mark.slow
def test_later_and_resumed_runs_repeat_the_first_to_the_bit(two_ranks, tmp_path):
    """Sub-batches sum in another order, so a run that measured others, or not at all, would differ."""
    steps = 5 * (autotune.ROUNDS + 1)
    first, cut_first = (two_ranks.run(outputs, tmp_path / f"{name}.json", steps, cuts) for name, cuts in CUTS.items())
    later = two_ranks.run(outputs, tmp_path / "whole.json", steps)
    resumed = two_ranks.run(outputs, tmp_path / "whole.json", steps, (1, 4, 9))
    cut_later = two_ranks.run(outputs, tmp_path / "cut.json", steps)
    for expected, runs in ((first, [later, resumed]), (cut_first, [cut_later])):
        for rank, (found, choices) in enumerate(expected):
            assert len({cut for *_, cut in found}) > 1  # candidates had turns
            assert all("@" not in choice for choice in choices.values())
            for run in runs:
                assert run[rank][1] == choices
                assert all(map(same_to_the_bit, run[rank][0], found))


CUTS = {"whole": (), "cut": (3,)}
"""Steps before which a run is cut off and resumed, by the name of its cache."""


def same_to_the_bit(mine, other):
    return all(torch.equal(*pair) for pair in zip(mine[:2], other[:2], strict=True)) and mine[2] == other[2]


def check_deterministic(path):
    blocks = plain_blocks(2)
    x, grad = torch.randn(2, 4, 4, WIDTH, dtype=torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with measuring(path):
            stack = make_stack(blocks, dist.group.WORLD, schedule="auto")
            compare(stack, blocks, dist.group.WORLD, x, grad)
            linear = OverlappedColumnLinear(4, 8)
            linear(torch.randn(256, 4, requires_grad=True)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    (tuning,) = stack.chooser.tunings.values()
    return tuning.chosen, linear._chunks._known, sum(map(len, tuning.times.values()))


def test_deterministic_torch_has_a_fixed_choice_and_nothing_is_measured(two_ranks, tmp_path):
    path = tmp_path / "schedules.json"
    assert two_ranks.run(check_deterministic, path) == [("oases 2", {}, 0)] * 2
    assert not path.exists()


def check_required_while_measuring(path):
    blocks = plain_blocks(2)
    x, grad = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
    with measuring(path):
        stack = make_stack(blocks, dist.group.WORLD, schedule="auto", require_overlap=True)
        compare(stack, blocks, dist.group.WORLD, x, grad)
    (tuning,) = stack.chooser.tunings.values()
    return [each.schedule.overlaps for each in tuning.candidates.values()]


def test_off_is_no_candidate_where_overlap_is_required(two_ranks, tmp_path):
    assert two_ranks.run(check_required_while_measuring, tmp_path / "s.json") == [[True] * 4] * 2


def test_the_environment_names_a_schedule(monkeypatch):
    """It replaces auto, and nothing else."""
    monkeypatch.setenv("OASES_SCHEDULE", "cross_pass@4")
    assert names([make_stack(plain_blocks(2), None, schedule="auto").schedule]) == [("cross_pass", 4)]
    assert names([make_stack(plain_blocks(2), None, schedule="oases").schedule]) == [("oases", 2)]
    monkeypatch.setenv("OASES_SCHEDULE", "sub_pipelined")
    assert names([make_stack(plain_blocks(2), None, schedule="auto", sub_batches=3).schedule]) == [
        ("sub_pipelined", 3)
    ]
    for wrong in ("auto", "oases@", "oases@two", "nosuch@2"):
        monkeypatch.setenv("OASES_SCHEDULE", wrong)
        with pytest.raises(UsageError, match=f"OASES_SCHEDULE='{wrong}'"):
            make_stack(plain_blocks(2), None, schedule="auto")


def test_the_cache_is_bounded_and_keeps_the_newest(two_ranks, tmp_path):
    path = tmp_path / "schedules.json"
    path.write_text(json.dumps({"key": "gone", **{str(number): "oases 2" for number in range(2000)}}))
    two_ranks.run(choose, path, [[1.0, 0.5, 0.9]] * 2)
    known = json.loads(path.read_text())
    assert [(key, *entry) for key, entry in known.items()][-2:] == [("1999", *"oases 2"), ("key", "turns", "chosen")]
    assert len(known) == 1000


def test_a_broken_cache_is_measured_anew(two_ranks, tmp_path):
    path = tmp_path / "schedules.json"
    path.write_text("[1, 2")
    for measured, _, _ in two_ranks.run(choose, path, [[1.0, 0.5, 0.9]] * 2):
        assert measured > 0


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
        from oases.core.execution.group import scheduler_of

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
    with pytest.raises(ValueError, match=r"'bfloat16', 'float16', 'int8' or None, got 'bf16'"):
        make_stack(plain_blocks(1), None, wire_dtype="bf16")
