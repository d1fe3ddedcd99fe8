"""Weights in shards: when they are gathered and freed, when gradients are sent, and what is there in between."""

import pytest
import torch
from torch import nn

from oases.core.blocks.program import BlockProgram
from oases.core.execution.gathering import UnitGatherer
from oases.core.execution.group import scheduler_of
from oases.core.schedule import generate, sequence_parallel
from oases.distributed.mesh import Mesh
from oases.models.gpt import GPT, GPTConfig
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Segment, Stage

SIZES = {"hidden": 16, "layers": 2, "heads": 4, "sequence": 8, "vocabulary": 32}
BLOCKS = 4


class Note:
    """A unit that notes what is asked of it."""

    def __init__(self, block, notes):
        self._block, self._notes, self.whole, self.under_way = block, notes, False, False

    def gather_ahead(self):
        if not self.whole and not self.under_way:
            self.under_way = True
            self._notes.append(f"start {self._block}")

    def gather(self):
        self.gather_ahead()
        self.whole, self.under_way = True, False

    def release(self):
        if self.whole:
            self.whole = False
            self._notes.append(f"free {self._block}")


def program_of(schedule, halved=False):
    program = BlockProgram(schedule, [nn.Identity()] * BLOCKS, "stack 0", None)
    program.halved, program.prologues = [halved] * BLOCKS, [False] * BLOCKS
    return program


def notes_of(schedule, halved=False):
    notes = []
    gathers = UnitGatherer([Note(block, notes) for block in range(BLOCKS)])
    program = program_of(schedule, halved)
    keys = {step.key for step in (*program.forward, *program.backward)}
    handlers = gathers.around(dict.fromkeys(keys, lambda step: notes.append(step.text)), program, lambda block: None)
    for steps in (program.forward, program.backward):
        gathers.begin(steps)
        for step in steps:
            handlers[step.key](step)
    return [note for note in notes if "all" not in note and "wait" not in note and "scatter" not in note]


def test_weights_come_one_block_ahead_and_go_after_the_last_op():
    notes = notes_of(generate("sync", BLOCKS, 1))
    first, second = notes.index("start 0"), notes.index("start 1")
    assert [first, second, notes.index("F 0.0")] == [0, 1, 2]
    for block in range(BLOCKS):
        assert notes.index(f"free {block}") == notes.index(f"C {block}.0") + 1
    backward = notes[notes.index(f"free {BLOCKS - 1}") + 1 :]
    assert backward[:3] == ["start 3", "start 2", "B 3.0"]
    assert backward[-1] == "free 0"


@pytest.mark.parametrize("name", ["oases", "cross_pass", "sub_pipelined_2"])
@pytest.mark.parametrize("again", [0, 1, 2])
@pytest.mark.parametrize("along", [False, True])
def test_each_pass_gathers_each_block_once(name, again, along):
    schedule = generate(name, BLOCKS, 2, again)
    notes = notes_of(sequence_parallel(schedule) if along else schedule, halved=along)
    for block in range(BLOCKS):
        assert notes.count(f"start {block}") == notes.count(f"free {block}") == 2


def test_after_a_failure_nothing_stays_whole():
    notes = []
    units = [Note(block, notes) for block in range(BLOCKS)]
    gathers, program = UnitGatherer(units), program_of(generate("oases", BLOCKS, 2))
    put = []

    def fail(step):
        assert units[0].whole
        assert put == [0]
        raise ValueError

    handlers = gathers.around({"F": fail}, program, put.append)
    gathers.begin(program.forward)
    with pytest.raises(ValueError, match=r"^$"):
        handlers["F"](program.forward[0])
    assert units[0].whole
    gathers.forget()
    assert not any(unit.whole for unit in units)


# --- real ranks ---


def sharded_gpt(micro_batches):
    segment = Segment(2 * SIZES["layers"], 1, "oases", 2, 1)
    plan = Plan(
        model=gpt(**SIZES), world=2, ranks_per_node=2, global_batch=12, micro_batches=micro_batches,
        stages=(Stage((segment,)),), fsdp=True,
    )  # fmt: skip
    mesh = Mesh.of(plan)
    return GPT(GPTConfig(**SIZES), plan=plan, mesh=mesh), mesh


def tokens():
    return torch.randint(32, (2, 4, 8), generator=torch.Generator().manual_seed(1))


def in_memory(unit):
    return [parameter.untyped_storage().size() > 0 for parameter in unit.parameters.values()]


def counts(group):
    return {label: total.count for label, total in scheduler_of(group).totals().items()}


def sent_by(average, mesh):
    """Number of sends of each unit's gradients: those received, and one on its way."""
    received = counts(mesh.data(1))
    labels = {bucket.unit.label: bucket.sent is not None for bucket in average._buckets}
    return {label: received.get(f"{label}, sharded gradients", 0) + flying for label, flying in labels.items()}


def check_one_step():
    model, mesh = sharded_gpt(3)
    for _ in range(3):
        model.loss(*tokens()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    average = model.shard_weights()
    units = ["embedding and head", *(f"block {b}" for b in range(4))]
    for number in (1, 2):
        average.begin_pass(0)
        model.loss(*tokens()).backward()
        average.end_pass()
        assert sent_by(average, mesh) == dict.fromkeys(units, number), "every micro-batch sends"
        assert all(p.grad is None for bucket in average._buckets for p in bucket.trained.values())
    gathered = counts(mesh.weights(1))
    started = []
    first = model.stack.segments[0]._units[0]
    last = model.stack.segments[0]._units[-1]
    first.parameters["up.weight" if "up.weight" in first.parameters else "qkv.weight"].register_hook(
        lambda _: started.append(([bucket.sent is not None for bucket in average._buckets], in_memory(last)))
    )
    with average.overlapped():
        model.loss(*tokens()).backward()
    assert sent_by(average, mesh) == dict.fromkeys(units, 3)
    assert started[0][0] == [True, True, False, False, False], "they are sent while the backward pass runs"
    assert not any(started[0][1]), "its weights are freed by then"
    now = counts(mesh.weights(1))
    assert all(now[f"block {b}, gathered weights"] == gathered[f"block {b}, gathered weights"] + 2 for b in range(4))
    for unit in [model.ends, *model.stack.segments[0]._units]:
        assert not any(in_memory(unit))
        assert all(parameter.grad is None for parameter in unit.parameters.values())
        assert all(shard.grad is not None for shard in unit.shards.values())
    for name, parameter in model.named_parameters():  # the average of ranks with equal batches
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=lambda m, n=name: f"{n}: {m}")
    mesh.destroy()


def test_gradients_are_sent_in_every_pass_and_early_and_nothing_whole_stays(two_ranks):
    two_ranks.run(check_one_step)


def check_shards():
    model, mesh = sharded_gpt(1)
    model.shard_weights()
    model.ends.gather()
    with pytest.raises(RuntimeError, match="embedding and head is gathered; release it first"):
        model.ends.shards  # noqa: B018
    model.ends.release()
    assert sum(shard.to_local().numel() for shard in model.ends.shards.values()) == (32 + 8 + 2) * 16 // 2
    mesh.destroy()


def test_shards_are_to_be_had_while_nothing_is_gathered(two_ranks):
    two_ranks.run(check_shards)
