"""`parallelize` as a whole: weights in and out, plans, meshes, what it says and what it refuses."""

import pytest
import torch
import torch.distributed as dist
import transformers
from partition.zoo import batch, build, config
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.bench.memory import measure_memory


def one_step(name, folder, out):
    """Build on meta, stream the weights, train a step of lr 0, and save."""
    kind = type(build(name))
    with torch.device("meta"):
        model = kind(config(name))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    oases.parallelize(model, mesh=mesh, weights=folder)
    loss = model(**batch(name)).loss
    loss.backward()
    oases.save_pretrained(model, out)
    return float(loss.detach()), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert"])
def test_pretrained_weights_are_cut_and_come_back(two_ranks, tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path / "one")
    expected = float(model(**batch(name)).loss.detach())
    whole = sum(p.numel() for p in model.parameters())
    for loss, held in two_ranks.run(one_step, name, tmp_path / "one", tmp_path / "two"):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert held < 0.8 * whole
    again = type(model).from_pretrained(tmp_path / "two")
    for (first, mine), (second, theirs) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert first == second
        assert torch.equal(mine, theirs)
    assert isinstance(again, transformers.PreTrainedModel)


def layers_computed_again(name, recompute):
    model = build(name)
    group = dist.group.WORLD
    oases.parallelize(model, mesh=group, recompute=recompute)
    found = []
    for each in model.oases_partition.layers:
        stack = each.runner.stack
        found.append(sorted({stack.layer_of[block] for block in stack.schedule.recomputed_blocks}))
    return found


@pytest.mark.parametrize(("name", "stacks"), [("gptj", 1), ("llama", 1), ("t5", 2)])
def test_recompute_counts_the_layers_of_the_model(two_ranks, name, stacks):
    """Of one block each, of two, and of three in a decoder."""
    for again in two_ranks.run(layers_computed_again, name, 1):
        assert again == [[0]] * stacks


def kept_by(model, x):
    return measure_memory(lambda: model(x).last_hidden_state, lambda out: out.sum().backward(), x.device).kept


def test_nothing_is_kept_that_the_author_s_layers_do_not_keep():
    """On one rank, where nothing is cut, graphs keep what autograd keeps of the same ops run one by one."""
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=160, vocab_size=90)
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
    x = torch.randint(0, 90, (4, 32))
    alone = kept_by(model, x)
    oases.parallelize(model, mesh=None, sub_batches=2)
    for _ in range(2):  # what the first call makes for the later ones is no part of a step
        kept = kept_by(model, x)
    assert kept <= 1.01 * alone
