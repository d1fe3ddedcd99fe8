import pytest
import torch.distributed as dist

from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.plans.check import require_nested


def members(group):
    return None if group is None else dist.get_process_group_ranks(group)


def groups_by_purpose():
    mesh = Mesh([1, 2, 4])
    found = (
        {t: members(mesh.tensor(t)) for t in (1, 2, 4)},
        {t: members(mesh.data(t)) for t in (1, 2, 4)},
        {(a, b): members(mesh.resharding(a, b)) for a, b in ((1, 2), (2, 4), (4, 1))},
        {t: mesh.replica(t) for t in (1, 2, 4)},
        len(mesh.groups),
    )
    mesh.destroy()
    return found


def test_groups_of_four_ranks(four_ranks):
    first, _, third, _ = four_ranks.run(groups_by_purpose)
    assert first[0] == {1: [0], 2: [0, 1], 4: [0, 1, 2, 3]}
    assert first[1] == {1: [0, 1, 2, 3], 2: [0, 2], 4: None}
    assert first[2] == {(1, 2): [0, 1], (2, 4): [0, 2], (4, 1): [0, 1, 2, 3]}
    assert third[0] == {1: [2], 2: [2, 3], 4: [0, 1, 2, 3]}
    assert third[1] == {1: [0, 1, 2, 3], 2: [0, 2], 4: None}
    assert third[2] == {(1, 2): [2, 3], (2, 4): [0, 2], (4, 1): [0, 1, 2, 3]}
    assert third[3] == {1: 2, 2: 1, 4: 0}
    assert third[4] == 5  # tensor 2 and 4, data 1 and 2, resharding 2 to 4: the others are these


def groups_of_one_degree():
    mesh, apart = Mesh([2]), Mesh([2], separate_groups=True)
    found = mesh.tensor(2).group_name == dist.group.WORLD.group_name, mesh.groups, len(apart.groups)
    mesh.destroy()
    apart.destroy()
    dist.barrier()  # the run's group is there still
    return found


def test_a_degree_that_all_ranks_share_has_the_group_of_the_run(two_ranks):
    assert two_ranks.run(groups_of_one_degree) == [(True, [], 1)] * 2


def on_one_node(per_node, order):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        return [Mesh.of_stages([[2], [2]], order=order).on_one_node(degree) for degree in (1, 2)]


@pytest.mark.parametrize(
    ("per_node", "order", "whole"), [(4, None, True), (2, None, True), (2, [0, 2, 1, 3], False), (1, None, False)]
)
def test_nodes_are_as_torchrun_numbers_ranks(four_ranks, per_node, order, whole):
    assert four_ranks.run(on_one_node, per_node, order) == [[True, whole]] * 4


def test_one_process_has_no_groups():
    mesh = Mesh([1])
    assert mesh.tensor(1) is None
    assert mesh.data(1) is None
    assert mesh.replica(1) == 0
    assert mesh.groups == []


def test_degrees_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="tp 2 does not divide the 1 ranks"):
        Mesh([2])
    with pytest.raises(UsageError, match="tp 4 and tp 6 do not nest"):
        require_nested([2, 4, 6])
    require_nested([3, 12, 6])
