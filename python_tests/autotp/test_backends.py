"""The same model over another backend: groups of the same ranks, and results of gloo's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import oases
from oases.autotp import checking
from oases.autotp.checking import with_backend
from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.testbed.backend import Backend


def described(mesh: Any) -> list[Any]:
    """Names, and by dimension the backend and ranks of the group."""
    groups = mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [mesh]
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    return [names, *((dist.get_backend(group), dist.get_process_group_ranks(group)) for group in groups)]


def made() -> list[list[Any]]:
    """Sums over the groups and meshes that `with_backend` makes."""
    found = [
        with_backend(given, "staged")[0]
        for given in (
            None,
            dist.new_group([0, 1, 2, 3]),
            init_device_mesh("cpu", (4,)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        )
    ]
    total = torch.ones(1)
    dist.all_reduce(total, group=found[-1]["tp"].get_group())
    assert total == 2
    return [described(each) for each in found]


def test_groups_keep_their_ranks(four_ranks):
    for rank, (default, group, flat, square) in enumerate(four_ranks.run(made)):
        assert default == group == flat == [None, ("staged", [0, 1, 2, 3])]
        across = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
        assert square == [("dp", "tp"), *(("staged", ranks) for ranks in across)]


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    said = []
    for given, backend in ((None, "nosuch"), (mesh, "staged"), (Mesh([2]), "staged")):
        with pytest.raises(UsageError) as caught:
            with_backend(given, backend)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_made_is_refused(two_ranks):
    unknown, stages, own = two_ranks.run(refused)[0]
    assert "unknown backend 'nosuch'; known are gloo" in unknown
    assert "without 'pp'; leave it out, and start the run over it: init_process_group('staged')" in stages
    assert own == stages


def chosen() -> list[Any]:
    """Whether `auto` leaves a group as it is that is faster, and its choice where sums there take long."""
    own = dist.new_group([0, 1], use_local_synchronization=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_seconds", lambda groups, device: [0.001, 0.002])
        same, said = with_backend(own, "auto")
    Backend.parse("sim:alpha=200ms,bandwidth=10GB/s").activate()
    slow = dist.new_group([0, 1], backend="sim", use_local_synchronization=True)
    other, found = with_backend(slow, "auto")
    return [same is own, said, dist.get_backend(other), found]


@pytest.mark.long
def test_auto_takes_what_sums_sooner(two_ranks):
    (same, said, name, found), (_, _, other, elsewhere) = two_ranks.run(chosen)
    assert same
    assert said[0].startswith("backend auto: an all-reduce beside matmuls takes 2.00 ms by staged, 1.00 ms by ")
    assert found == elsewhere
    staged, slow = (float(re.search(rf"([\d.]+) ms by {of}", found[0])[1]) for of in ("staged", "sim"))
    assert slow >= 200
    assert name == other == ("staged" if staged < slow else "sim"), "what a busy machine measures is heeded, too"


def chosen_over_replicas() -> bool:
    """Whether a mesh stays as it is where its own group is faster on one of two replicas alone."""
    groups = [dist.new_group(each, use_local_synchronization=True) for each in ([0, 1], [dist.get_rank()])]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=torch.tensor([[0], [1]]), mesh_dim_names=("dp", "tp"))
    found = [[0.003, 0.002], [0.001, 0.002]][dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_seconds", lambda groups, device: found)
        made, _ = with_backend(mesh, "auto")
    return made is mesh


def test_replicas_choose_alike(two_ranks):
    first, second = two_ranks.run(chosen_over_replicas)
    assert first == second


def refused_staged() -> tuple[bool, list[str]]:
    def fails(group: Any, backend: str) -> Any:
        raise UsageError("staged joins as many ranks of each node")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_again", fails)
        same, said = with_backend(None, "auto")
    return same is None, said


def test_auto_keeps_the_group_where_staged_cannot_join_it(two_ranks):
    for same, said in two_ranks.run(refused_staged):
        assert same
        assert said == ["backend auto: staged joins as many ranks of each node; the mesh keeps its own groups"]


def test_without_ranks_it_is_refused():
    with pytest.raises(UsageError, match="needs ranks; start them"):
        with_backend(None, "staged")


def losses(backend: str) -> tuple[str, list[torch.Tensor]]:
    """Backend of a sharded Llama's group; its loss and gradients."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = oases.parallelize(transformers.LlamaForCausalLM(config), backend=backend)
    ids = torch.arange(64).view(4, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    used = dist.get_backend(model.oases_mesh.get_group("tp"))
    return used, [loss.detach(), *(parameter.grad.to_local() for parameter in model.parameters())]


@pytest.mark.slow
def test_a_model_over_shared_memory_has_the_gradients_of_gloo(two_ranks):
    """Two numbers have one sum, in either order."""
    for (name, ours), (other, theirs) in zip(
        two_ranks.run(losses, "staged"), two_ranks.run(losses, "gloo"), strict=True
    ):
        assert (name, other) == ("staged", "gloo")
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
