"""Pipelines on real ranks against one process: losses, gradients, messages, memory, and what fails."""

import dataclasses
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_examples import WIDTH, make_stack, plain_blocks, plain_forward

from oases.core.blocks.sharding import sharded_parameters
from oases.core.schedule import Op, ScheduleError
from oases.core.schedule.pipeline import PIPELINES, generate_pipeline
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages, crossing, sends_confirmed_by, waiting_for
from oases.distributed.pipeline import StageRunner
from oases.errors import UsageError
from oases.layers.linear import shard
from oases.plans.pipelines import chunks_of

RUN = sorted(PIPELINES)


def mesh_of(stages, tp, timeout=None):
    """The mesh of this rank's stage."""
    ranks = dist.get_world_size() // stages
    made = [Mesh([tp], timeout=timeout, stage=stage, num_stages=stages) for stage in range(stages)]
    return made[dist.get_rank() // ranks]


def whole_model(micro_batches, ends):
    """One process: losses and gradients of blocks in parts that end where `ends` says."""
    blocks = plain_blocks(ends[-1])
    losses = []
    for m in range(micro_batches):
        losses.append(plain_forward(blocks, sample(m)).square().mean() / micro_batches)
        losses[-1].backward()
    return torch.stack(losses).detach(), blocks


def sample(m):
    return torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(m))


def check_run(name, micro_batches, ends, tp, schedule, recompute, split):
    """ends: of each part of the model, its last block's number plus one."""
    world = dist.get_world_size()
    stages = world // tp
    pipeline = generate_pipeline(name, stages, micro_batches)
    expected, blocks = whole_model(micro_batches, ends)
    mesh = mesh_of(stages, tp)
    starts = [0, *ends[:-1]]
    parts = [part for part in range(len(ends)) if pipeline.stage_of(part) == mesh.stage]
    mine = {part: plain_blocks(ends[-1])[starts[part] : ends[part]] for part in parts}
    stacks = {
        part: make_stack(some, mesh.tensor(tp), schedule=schedule, recompute=recompute) for part, some in mine.items()
    }
    messages = StageMessages(pipeline, mesh, [tp] * (len(ends) - 1), split=split)
    run = StageRunner(pipeline, mesh.stage, messages)

    def forward(part, m, inputs, context):
        y = stacks[part](inputs[0] if inputs else sample(m), context=context)
        return [y.square().mean() / micro_batches if part == len(ends) - 1 else y]

    for _ in range(2):
        for stack in stacks.values():
            stack.zero_grad()
        losses = run.run(forward)
    validation = run.evaluate(forward)
    if parts[-1] == len(ends) - 1:
        torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.stack(validation), expected, rtol=1e-12, atol=1e-14)
    else:
        assert losses == validation == []
    for part, stack in stacks.items():
        dims = {key: dim for key, _, dim in sharded_parameters(stack)}
        for index, block in enumerate(blocks[starts[part] : ends[part]]):
            for layer, module in zip(block, ("norm", "up", "down"), strict=True):
                for key, parameter in layer.named_parameters():
                    path = f"blocks.{index}.{module}.{key}"
                    whole = shard(parameter.grad, dims.get(path), mesh.tensor(tp))
                    torch.testing.assert_close(stack.get_parameter(path).grad, whole, rtol=1e-11, atol=1e-13)
    rows = {row.where: (row.collectives, row.bytes) for row in messages.rows}
    messages.close()
    mesh.destroy()
    return rows


def ends_of(name, stages, uneven):
    parts = stages * chunks_of(name or "one_f_one_b")
    sizes = [3, 1, 2, 1, 1, 2, 1, 1] if uneven else [2] * 8
    return list(itertools.accumulate(sizes[:parts]))


COVER = [
    ("gpipe", 4, 1, "oases", "full"),
    ("gpipe", 6, 2, "sync", "none"),
    ("one_f_one_b", 9, 1, "sync", 1),
    ("one_f_one_b", 2, 2, "oases", "full"),
    ("pre_recompute", 4, 1, "sync", "full"),
    ("pre_recompute", 5, 2, "oases", 1),
    ("last_no_recompute", 8, 1, "oases", 1),
    ("last_no_recompute", 3, 2, "sync", "full"),
    ("shifted_critical_path", 4, 1, "oases", "none"),
    ("shifted_critical_path", 9, 1, "sync", "full"),
    ("shifted_critical_path", 5, 2, "oases", "full"),
    ("zb_h1", 4, 1, "sync", 1),
    ("zb_h1", 6, 2, "oases", "full"),
    ("zb_h1", 3, 2, "sync", "none"),
    ("interleaved", 8, 1, "oases", 1),
    ("interleaved", 4, 2, "sync", "full"),
    ("zb_v", 8, 1, "oases", 1),
    ("zb_v", 4, 2, "sync", "full"),
    ("zb_v", 4, 1, "sync", "none"),
]


@pytest.mark.long
@pytest.mark.few(7)
@pytest.mark.parametrize(("name", "micro_batches", "tp", "schedule", "recompute"), COVER)
def test_stages_equal_one_process(four_ranks, name, micro_batches, tp, schedule, recompute):
    stages = 4 // tp
    uneven = recompute != 1
    ends = ends_of(name, stages, uneven)
    rows = four_ranks.run(check_run, name, micro_batches, ends, tp, schedule, recompute, True)
    size = 4 * 3 * WIDTH * 8 // tp
    sent, received = rows[0]["activations, stage 0 to 1"], rows[tp]["activations, stage 0 to 1"]
    times = 3 * micro_batches * (1 if name != "interleaved" else 2)  # two steps and one evaluation
    assert sent == received == (times, times * size)


def test_whole_messages(four_ranks):
    rows = four_ranks.run(check_run, "one_f_one_b", 4, ends_of("", 2, False), 2, "sync", "none", False)
    assert rows[0]["gradients, stage 1 to 0"] == (2 * 4, 2 * 4 * 4 * 3 * WIDTH * 8)


@pytest.mark.parametrize("name", RUN)
def test_a_send_is_known_to_have_arrived_from_what_follows_it(name):
    """Each receive confirms sends before it, and each confirmed send is confirmed once."""
    for stages, micro_batches in ((2, 2), (2, 8), (3, 6), (4, 4), (4, 12)):
        pipeline = generate_pipeline(name, stages, micro_batches)
        for stage, ops in enumerate(pipeline.stages):
            known = sends_confirmed_by(pipeline, stage)
            place = {op: at for at, op in enumerate(ops)}
            assert set(known) == {op for op in ops if op.kind == "receive"}
            proven = [send for sends in known.values() for send in sends]
            assert len(proven) == len(set(proven))
            for receive, sends in known.items():
                assert all(place[send] < place[receive] for send in sends)
                assert all(crossing(crossing(send)) == send for send in sends)


def check_contents(split):
    """Activations that a stage receives, and the gradients that come back, element by element."""
    pipeline, mesh = generate_pipeline("one_f_one_b", 2, 3), mesh_of(2, 2)
    messages = StageMessages(pipeline, mesh, [2], split=split)
    numbers = torch.arange(8, dtype=torch.float64).view(4, 2)
    received, sent = [], [(numbers + 10 * m).requires_grad_() for m in range(3)]

    def forward(part, m, inputs, context):
        if not inputs:
            return [sent[m] * 1]
        received.append(inputs[0].detach().clone())
        return [(inputs[0] * (numbers + m)).sum()]

    StageRunner(pipeline, mesh.stage, messages).run(forward)
    for m, x in enumerate(received):
        assert torch.equal(x, numbers + 10 * m)
    if mesh.stage == 0:
        for m, x in enumerate(sent):
            assert torch.equal(x.grad, numbers + m)
    assert len(received) == 3 * mesh.stage
    messages.close()
    mesh.destroy()


def check_several(split):
    """Tensors of other types and of sizes that do not divide over the ranks, one of which the loss does not read."""
    pipeline, mesh = generate_pipeline("one_f_one_b", 2, 3), mesh_of(2, 2)
    messages = StageMessages(pipeline, mesh, [2], split=split)
    shapes = [((3, 5), torch.float64), ((7,), torch.float32), ((2, 1), torch.bfloat16)]
    sent = [[torch.full(shape, m + 1.0, dtype=dtype).requires_grad_() for shape, dtype in shapes] for m in range(3)]
    received = []

    def forward(part, m, inputs, context):
        if not inputs:
            return [each * 1 for each in sent[m]]
        received.append([each.detach().clone() for each in inputs])
        return [(inputs[0] * m).sum() + inputs[1].double().square().sum()]

    StageRunner(pipeline, mesh.stage, messages).run(forward)
    for m, given in enumerate(sent):
        if mesh.stage == 0:
            expected = [torch.full_like(given[0], m), 2 * given[1].detach(), torch.zeros_like(given[2])]
            assert all(torch.equal(x.grad, gradient) for x, gradient in zip(given, expected, strict=True))
        else:
            assert all(torch.equal(x, y) for x, y in zip(received[m], given, strict=True))
    messages.close()
    mesh.destroy()


def test_messages_arrive_whole_and_in_order(four_ranks):
    for split in (True, False):
        four_ranks.run(check_contents, split)
        four_ranks.run(check_several, split)


def identity(part, m, inputs, context):
    """A model of no weights, whose gradient is what is sent."""
    return [inputs[0] * 2 if inputs else torch.ones(4, 2).requires_grad_() * 2]


def run_of(name, stages, micro_batches, timeout=None):
    pipeline = generate_pipeline(name, stages, micro_batches)
    mesh = mesh_of(stages, 1, timeout)
    messages = StageMessages(pipeline, mesh, [1] * (stages - 1))
    return StageRunner(pipeline, mesh.stage, messages), mesh


def check_failing(kind):
    run, mesh = run_of("one_f_one_b", 4, 6)

    def forward(part, m, inputs, context):
        if (part, m) == (2, 3) and kind == "raises":
            raise ArithmeticError("no such number")
        (y,) = identity(part, m, inputs, context)
        if (part, m) == (2, 3) and kind == "other shape":
            y = y[:2]
        return [y.sum() if part == 3 else y]

    with pytest.raises((RuntimeError, ArithmeticError, ValueError)) as caught:
        run.run(forward)
    with pytest.raises(RuntimeError, match=r"rank 2 failed at .*F 2.3 \(stage 2|was closed after a failure"):
        run.run(forward)
    mesh.destroy()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "message"), [("raises", "no such number"), ("other shape", "one shape")])
def test_a_stage_that_fails_ends_its_neighbours(four_ranks, kind, message):
    for error in four_ranks.run(check_failing, kind):
        assert message in error


def check_silence():
    run, mesh = run_of("gpipe", 2, 2, timedelta(seconds=2))
    text = ""
    if mesh.stage == 1:
        with pytest.raises(RuntimeError) as caught:
            run.run(identity)
        text = str(caught.value)
    dist.barrier()
    run.messages.close()
    mesh.destroy()
    return text


class Lost:
    """A message that is lost."""

    def __init__(self):
        self.seen = []

    def wait(self):
        self.seen.append(waiting_for())
        raise RuntimeError("gone\nand more")


def check_waiting():
    run, mesh = run_of("gpipe", 2, 2)
    lost, what = Lost(), Op("receive", 1, 0, "F") if mesh.stage else Op("send", 0, 0, "F")
    with pytest.raises(dist.DistBackendError) as caught:
        run.messages._wait(lost, what)
    assert waiting_for() == ""
    assert str(caught.value) == f"{lost.seen[0]}: gone"
    run.messages.close()
    mesh.destroy()
    return lost.seen


def test_who_asks_hears_which_message_a_rank_waits_for(two_ranks):
    assert two_ranks.run(check_waiting) == [
        ["send F 0.0 on stage 0, to stage 1 (rank 1)"],
        ["receive F 1.0 on stage 1, from stage 0 (rank 0)"],
    ]


@pytest.mark.long
def test_a_stage_that_hears_nothing_names_what_it_waits_for(two_ranks):
    assert "receive F 1.0 on stage 1, from stage 0 (rank 0): " in two_ranks.run(check_silence)[1]


def check_early(name, micro_batches):
    """Micro-batches that are recomputed before their gradient is received."""
    run, mesh = run_of(name, 4, micro_batches)
    early = []

    class Noted:
        def __init__(self, m):
            self.m = m

        def recompute(self):
            early.append(self.m)

    kept = []

    def forward(part, m, inputs, context):
        kept.append(Noted(m))  # a context holds calls weakly
        context.handles.add(kept[-1])
        (y,) = identity(part, m, inputs, context)
        return [y.sum() if part == 3 else y]

    run.run(forward)
    run.messages.close()
    mesh.destroy()
    return early


def test_recomputation_is_early_where_the_list_has_it_before_the_gradient(four_ranks):
    assert four_ranks.run(check_early, "one_f_one_b", 8) == [[], [], [], []]
    assert four_ranks.run(check_early, "pre_recompute", 8) == [[5, 6, 7], [6, 7], [7], []]
    assert four_ranks.run(check_early, "shifted_critical_path", 8) == [[5, 6, 7], [0, 6, 7], [0, 1], []]


def check_kept():
    """Outputs that were sent are let go of: between its passes a micro-batch keeps its graph alone."""
    run, mesh = run_of("gpipe", 2, 4)
    alive = []

    def forward(part, m, inputs, context):
        (y,) = identity(part, m, inputs, context)
        y = F.relu(y) * 1.0 if part == 0 else y.sum()  # a multiplication by a number does not save its output
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        return [y]

    kept = []
    original = run._do_B
    run._do_B = lambda step: (kept.append(sum(not ref.expired() for ref in alive)), original(step))
    run.run(forward)
    run.messages.close()
    mesh.destroy()
    return kept


def test_what_was_sent_is_let_go_of(two_ranks):
    first, _ = two_ranks.run(check_kept)
    assert len(first) == 4
    assert first[-1] == 0


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match="2 stages need messages"):
        StageRunner(generate_pipeline("gpipe", 2, 4), 0, None)


def check_order():
    good = generate_pipeline("gpipe", 2, 2)
    first = tuple(op for op in good.stages[1] if op != Op("receive", 1, 1, "F"))
    mixed = dataclasses.replace(good, ops=(*good.stages[0], Op("receive", 1, 1, "F"), *first))
    mesh = mesh_of(2, 1)
    with pytest.raises(ScheduleError, match=r"stage 1 waits for receive F 1\.1 where receive F 1\.0 comes first"):
        StageMessages(mixed, mesh, [1])
    with pytest.raises(ValueError, match="2 stages with 1 parts each was given a mesh of 2 stages and 2 degrees"):
        StageMessages(good, mesh, [1, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")  # as gloo says, without a GPU
        with pytest.raises(UsageError, match="gloo sends no tensors of cuda"):
            StageMessages(good, mesh, [1], device="cuda")
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.delenv("CUDA_MODULE_LOADING", raising=False)
        with pytest.raises(UsageError, match="CUDA_MODULE_LOADING=EAGER in the environment before CUDA starts"):
            StageMessages(good, mesh, [1], device="cuda")
    mesh.destroy()


def test_messages_that_overtake_each_other_are_refused(two_ranks):
    two_ranks.run(check_order)


def test_one_stage_needs_no_messages():
    pipeline = generate_pipeline("one_f_one_b", 1, 3)
    weight = torch.ones(2, requires_grad=True)
    losses = StageRunner(pipeline, 0, None).run(lambda part, m, inputs, context: [(weight * m).sum()])
    assert [float(loss) for loss in losses] == [0.0, 2.0, 4.0]
    assert weight.grad.tolist() == [3.0, 3.0]
