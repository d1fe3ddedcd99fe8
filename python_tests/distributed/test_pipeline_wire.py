"""Quantised messages between pipeline stages: within half a step of each block; exact where not asked for."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import oases
from oases.core.execution.failure import begin_call
from oases.core.schedule.pipeline import generate_pipeline
from oases.distributed.mesh import Mesh
from oases.distributed.message_layout import Layout
from oases.distributed.messages import StageMessages
from oases.distributed.pipeline import StageRunner
from oases.errors import UsageError
from oases.models.options import Degrees
from oases_train.config import TrainConfig
from oases_train.plan import Run
from oases_train.trainer import Trainer

FORM = (((5, 70), torch.float32), ((7,), torch.float32), ((3, 1, 50), torch.bfloat16), ((2, 64), torch.float16))
"""Tensors of a message; the second is smaller than a block. Tails of blocks are 94, 7, 22 and 0 numbers."""
SMALL = 1
MICRO_BATCHES = 3


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in FORM]


def form_of(given):
    return tuple((each.shape, each.dtype) for each in given)


def blocks_of(x):
    flat = x.detach().double().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % 128)).view(-1, 128)


def check_rounded(found, sent):
    """Every number of int8 is within half a step of its block, and, where its type is shorter, a rounding of that."""
    half = blocks_of(sent).abs().amax(1, keepdim=True) / 254 * (1 + 1e-6)
    rounding = torch.finfo(sent.dtype).eps / 2 * blocks_of(sent).abs() if sent.dtype != torch.float32 else 0
    error = (blocks_of(found) - blocks_of(sent)).abs()
    assert (error <= half * (1 + 2**-7) + rounding).all()
    assert error.max() > half.max() / 4, "something was rounded"


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_message_comes_out_of_its_bytes(parts, quantised):
    given = tensors(0)
    before = [each.clone() for each in given]
    layout = Layout(form_of(given), parts, quantised)
    whole = layout.pack(given)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True)), "the sender's own"
    assert len(whole) * whole.element_size() == parts * layout.part_bytes
    found = layout.unpack(whole)
    assert form_of(found) == form_of(given)
    assert torch.equal(found[SMALL], given[SMALL])
    for number, (x, y) in enumerate(zip(found, given, strict=True)):
        if quantised and number != SMALL:
            check_rounded(x, y)
        else:
            assert torch.equal(x, y)
    assert layout.saved_bytes * parts == pytest.approx(Layout(form_of(given), parts).part_bytes * parts - len(whole))


def test_one_tensor_of_a_message_alone():
    x = torch.randn(3, 128)
    assert not Layout(form_of([x]), 2).is_packed
    assert Layout(form_of([x]), 2).pack([x]).data_ptr() == x.data_ptr(), "no copy where nothing is rounded"
    check_rounded(Layout(form_of([x]), 2, True).unpack(Layout(form_of([x]), 2, True).pack([x]))[0], x)
    assert not Layout(form_of([x[0, :127]]), 1, True).is_packed, "less than a block"


def mesh_of(stages, tp):
    ranks = dist.get_world_size() // stages
    made = [Mesh([tp], stage=stage, num_stages=stages) for stage in range(stages)]
    return made[dist.get_rank() // ranks]


def run_two_stages(wire, tp=1, split=None):
    """Messages of two stages and back: (sent, gradients that came back), or (received, gradients sent); rows."""
    pipeline, mesh = generate_pipeline("one_f_one_b", 2, MICRO_BATCHES), mesh_of(2, tp)
    messages = StageMessages(pipeline, mesh, [tp], split=split, wire=wire)
    leaves = [[each.requires_grad_() for each in tensors(m)] for m in range(MICRO_BATCHES)]
    received, copies = [], []

    def forward(part, m, inputs, context):
        if part == 0:
            made = [2 * each for each in leaves[m]]
            copies.append([each.detach().clone() for each in made])
            return made
        received.append([each.detach().clone() for each in inputs])
        weights = tensors(10 + m)
        return [sum((x.double() * w.double()).sum() for x, w in zip(inputs, weights, strict=True))]

    losses = StageRunner(pipeline, mesh.stage, messages).run(forward)
    rows = {row.where: row for row in messages.rows}
    messages.close()
    mesh.destroy()
    gradients = [[each.grad for each in some] for some in leaves] if mesh.stage == 0 else []
    return {"sent": copies, "received": received, "gradients": gradients, "losses": losses, "rows": rows}


def check_two_stages(found, wire, first_of_last):
    first, last = found[0], found[first_of_last]
    for m in range(MICRO_BATCHES):
        sent, weights = [2 * each for each in tensors(m)], tensors(10 + m)
        assert all(torch.equal(x, y) for x, y in zip(first["sent"][m], sent, strict=True))
        bound = 0.0
        for n, (x, given, gradient, weight) in enumerate(
            zip(last["received"][m], sent, first["gradients"][m], weights, strict=True)
        ):
            assert x.dtype == given.dtype == gradient.dtype
            if n == SMALL or not wire:
                assert torch.equal(x, given)
                assert torch.equal(gradient, 2 * weight)
                continue
            check_rounded(x, given)
            check_rounded(gradient, 2 * weight)
            half = blocks_of(given).abs().amax(1, keepdim=True) / 254
            half = half + torch.finfo(given.dtype).eps * blocks_of(given).abs()
            bound += float((blocks_of(weight).abs() * half * (1 + 2**-7)).sum())
        exact = sum(float((x.double() * w.double()).sum()) for x, w in zip(sent, weights, strict=True))
        loss = float(last["losses"][m])
        assert loss == pytest.approx(exact, abs=1e-9) if not wire else 0 < abs(loss - exact) <= bound
    exact_bytes = Layout(form_of(tensors(0)), found[0]["parts"]).part_bytes
    for where, row in first["rows"].items():
        assert row.collectives == MICRO_BATCHES, where
        assert row.bytes + row.saved_bytes == MICRO_BATCHES * exact_bytes
        assert (row.saved_bytes > 0.3 * exact_bytes) if wire else row.saved_bytes == 0


@pytest.mark.parametrize("wire", ["", "int8"])
def test_two_stages(two_ranks, wire):
    found = two_ranks.run(run_two_stages, wire)
    check_two_stages([each | {"parts": 1} for each in found], wire, 1)


@pytest.mark.parametrize("split", [True, False])
def test_tensor_parallel_ranks_send_one_message(four_ranks, split):
    found = four_ranks.run(run_two_stages, "int8", 2, split)
    check_two_stages([each | {"parts": 1 + split} for each in found], "int8", 2)
    for some, others in zip(found[2]["received"], found[3]["received"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def check_bad_numbers():
    """A NaN among the activations, an infinity among the gradients."""
    pipeline, mesh = generate_pipeline("gpipe", 2, 1), mesh_of(2, 1)
    messages = StageMessages(pipeline, mesh, [1], wire="int8")
    leaf, received = torch.ones(3, 128, requires_grad=True), []

    def forward(part, m, inputs, context):
        if part == 0:
            x = leaf * 1
            x.data[1, 5] = torch.nan
            return [x]
        received.append(inputs[0].detach().clone())
        weight = torch.ones(3, 128)
        weight[2, 7] = torch.inf
        return [(inputs[0] * weight).sum()]

    StageRunner(pipeline, mesh.stage, messages).run(forward)
    messages.close()
    mesh.destroy()
    return received[0] if received else leaf.grad


def test_a_bad_number_is_seen(two_ranks):
    """All of its block is NaN, and no other."""
    gradient, received = two_ranks.run(check_bad_numbers)
    for found, bad in ((received, 1), (gradient, 2)):
        assert found.isnan().all(1).tolist() == [row == bad for row in range(3)]
        torch.testing.assert_close(found[0], torch.ones(128), rtol=1e-6, atol=0)


def check_other_wires(stages):
    wire = "int8" if dist.get_rank() < 2 else ""
    mesh = mesh_of(stages, 1)
    # Ranks that agreed on their own wire in another test would not ask again.
    begin_call(mesh.run, "messages between pipeline stages", ("pipeline_wire", "of no test"))
    with pytest.raises(UsageError, match=r"the pipeline_wire differs .* int8 on rank 0, None on rank 2"):
        StageMessages(generate_pipeline("gpipe", stages, stages), mesh, [1] * (stages - 1), wire=wire)
    mesh.destroy()
    with pytest.raises(UsageError, match=r"pipeline_wire must be 'int8' or None, got 'int4'"):
        StageMessages(generate_pipeline("gpipe", stages, stages), mesh, [1] * (stages - 1), wire="int4")


def test_ranks_with_other_wires(four_ranks):
    """All of them get an error, those whose neighbours agree, too."""
    four_ranks.run(check_other_wires, 4)


def check_float64():
    pipeline, mesh = generate_pipeline("gpipe", 2, 1), mesh_of(2, 1)
    messages = StageMessages(pipeline, mesh, [1], wire="int8")

    def forward(part, m, inputs, context):
        return [inputs[0].sum() if inputs else torch.ones(200, dtype=torch.float64).requires_grad_() * 1]

    with pytest.raises((ValueError, RuntimeError)) as caught:
        StageRunner(pipeline, mesh.stage, messages).run(forward)
    mesh.destroy()
    return str(caught.value)


def test_a_type_that_is_not_rounded(two_ranks):
    message = two_ranks.run(check_float64)[0]
    assert "cannot send (200,) torch.float64 in int8" in message
    assert "leave out pipeline_wire" in message


CONFIG = TrainConfig(
    hidden=32, layers=2, heads=4, sequence=16, batch=8, steps=6, micro_batches=2, warmup=1,
    degrees=Degrees(pipeline=2, tensor=1),
)  # fmt: skip


def losses(data, wire):
    trainer = Trainer(dataclasses.replace(CONFIG, data=data, pipeline_wire=wire))

    def saved():
        return sum(row.saved_bytes for row in trainer.overlap().others)

    before = saved()  # of other tests in the same groups
    found = [trainer.step() for _ in range(CONFIG.steps)]
    after = saved()
    trainer.close()
    return found, after - before


def test_training(two_ranks, tmp_path):
    data = tmp_path / "text.txt"
    data.write_text("To be, or not to be, that is the question. " * 200)
    (exact, none), (lossy, saved) = (two_ranks.run(losses, str(data), wire)[0] for wire in ("none", "int8"))
    assert lossy != exact
    assert lossy == pytest.approx(exact, rel=2e-3)
    assert exact[-1] < exact[0] - 0.1, "it learns"
    assert none == 0
    # Activations out and gradients in: each a byte per number and a 32nd in place of 4.
    sent = 2 * CONFIG.steps * CONFIG.batch * CONFIG.sequence * CONFIG.hidden
    assert saved == sent * (4 - 33 / 32)


def test_what_it_is_not_for():
    with pytest.raises(UsageError, match="pipeline_wire 'int8': there is one stage; give --pp, or leave it out"):
        Run.of(dataclasses.replace(CONFIG, degrees=Degrees(tensor=2), pipeline_wire="int8"), 2)
    with pytest.raises(UsageError, match="pipeline_wire 'int8': there is one stage; give a mesh with a 'pp' above 1"):
        oases.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), pipeline_wire="int8")


@pytest.mark.parametrize("option", ["wire_dtype", "gradient_wire", "pipeline_wire"])
@pytest.mark.parametrize("former", ["fp8", "int4", "int8:rotated", "int8:stochastic"])
def test_former_codes_are_refused_with_what_is_left(option, former):
    with pytest.raises(UsageError, match=f"unknown {option} '{former}'; known are none, .*int8"):
        dataclasses.replace(CONFIG, **{option: former})
