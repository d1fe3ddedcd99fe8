"""Models in stages whose modes, callers, lengths and numbers of samples change between steps, beside one process."""

import pytest
import torch
import torch.utils._pytree as pytree
from autotp.staged import mesh_of
from torch import nn

import oases
from oases.autotp.export import twin_of
from oases.autotp.pipeline import units

WIDTH = 8


class Gated(nn.Module):
    """A model whose head reads the result of its first module again, in training or when asked to."""

    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x, y, again=False):
        h = first = self.start(x)
        for layer in self.layers:
            h = layer(h)
        h = h + first if again or self.training else h
        return (self.head(h)[:, 0].float() - y).square().mean()


def gated(shape):
    """The pair of a model in one process and in stages, its arguments, and those of this rank."""
    torch.manual_seed(0)
    plain, model, given = Gated(), Gated(), (torch.randn(12, WIDTH), torch.randn(12))
    model.load_state_dict(plain.state_dict())
    spec = oases.ParallelSpec(inputs=(given, {}))
    oases.parallelize(model, mesh=mesh_of(*shape), micro_batches=2, spec=spec)
    return plain, model, given


def in_turns(shape):
    """Losses of both models: what stages send each other changes while the batches keep their shapes."""
    plain, model, given = gated(shape)
    pairs = []
    for low, training, again in ((0, 1, 0), (0, 0, 0), (0, 0, 1), (1, 1, 0), (0, 1, 0), (1, 0, 0)):
        for each in (plain, model):
            each.train(bool(training))
        with torch.autocast("cpu", enabled=bool(low)):
            run = model.train_step if training else model.eval_step
            pairs.append((float(plain(*given, again=bool(again)).detach()), float(run(*given, again=bool(again)))))
    model.oases_pipeline.close()
    return pairs


def test_messages_may_change_with_batches_of_one_shape(two_ranks):
    for pairs in two_ranks.run(in_turns, (2, 1, 1)):
        for expected, found in pairs:
            assert found == pytest.approx(expected, rel=1e-2)


def called_between_steps():
    """Calls and backward passes of one's own, in turns with steps."""
    plain, model, given = gated((1, 2, 1))
    mine = [each.chunk(2)[model.oases_pipeline.mesh.replica(1)] for each in given]
    for own in (False, True, True, False):
        for each in (plain, model):
            each.zero_grad()
        if own:
            with model.no_sync():
                model(*mine).backward()
            model(*mine).backward()
            plain(*given).backward()
        else:
            model.train_step(*mine)
        plain(*given).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, msg=f"{own} {name}")


def test_a_model_of_one_stage_averages_its_gradients_in_loops_of_ones_own(two_ranks):
    two_ranks.run(called_between_steps)


def of_unequal_replicas():
    """The first of two replicas has two thirds of the samples."""
    plain, model, given = gated((1, 2, 1))
    plain(*given).backward()
    mine = [each[:8] if model.oases_pipeline.mesh.replica(1) == 0 else each[8:] for each in given]
    loss = model.train_step(*mine)
    torch.testing.assert_close(loss, plain(*given).detach(), check_dtype=False)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, msg=name)


def test_replicas_may_have_other_numbers_of_samples(two_ranks):
    two_ranks.run(of_unequal_replicas)


def test_shapes_of_ever_new_lengths_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(units, "MOST_KNOWN", 3)
    known = units.Units(twin_of(nn.ModuleDict({"unit": nn.Linear(2, 5)})), ["unit"])
    for length in (1, 2, 3, 4, 1):
        given, tree = pytree.tree_flatten(((torch.zeros(length, 2),), {}))
        (result,), _ = known._result_of("unit", given, tree)
        assert result.shape == (length, 5)
    assert len(known.shapes) == 3
