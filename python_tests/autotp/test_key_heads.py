"""Fewer key heads than ranks: each on several ranks, beside one process in double precision."""

import pytest
import torch
import torch.distributed as dist
from autotp.zoo import build
from autotp.zoo_runs import trained_beside_itself

import oases
from oases.autotp.shapes import Copied, copies_of
from oases.autotp.splitter import take_copy, take_own

pytestmark = pytest.mark.usefixtures("shared_traces")

FEW = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
KEYS = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]


def test_ranks_take_the_heads_of_their_queries():
    """Two keys over four ranks, and their repetition for eight queries, of which each rank has two."""
    keys = torch.arange(2).repeat_interleave(3)
    repeated = keys.view(2, 1, 3).expand(2, 4, 3)
    for rank in range(4):
        mine = take_copy(keys, 0, 2, rank, 4)
        assert mine.tolist() == [rank // 2] * 3
        assert torch.equal(take_own(repeated[rank // 2], 0, 2, rank), repeated.reshape(8, 3)[2 * rank : 2 * rank + 2])
    assert Copied((4,), 2) != (4,)
    assert (copies_of(Copied((4,), 2)), copies_of((4,))) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"attn_implementation": "eager"}),
        ("qwen3", {"sequence_parallel": False, "recompute": "full"}, {}),
        ("cohere", {"schedule": "layers"}, {}),
    ],
)
def test_few_key_heads_train_as_in_one_process(four_ranks, name, options, changes):
    found = four_ranks.run(trained_beside_itself, name, options, torch.float64, 3, FEW | changes)
    for result in found:
        assert result["logits"] <= 1e-6  # norms cast to float32
        assert result["gradients"][0] <= 1e-6, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-6)
        (layers,) = result["report"]["layers"]
        assert layers["copied"] == KEYS
        assert "self_attn.q_proj.weight" in layers["column"]
        assert set(KEYS) <= set(layers["replicated"])
        assert set(KEYS).isdisjoint(layers["column"])


def generated():
    plain = build("llama", **FEW).double().eval()
    model = oases.parallelize(build("llama", **FEW).double().eval())
    start = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(2))
    words, caches = [], []
    for each in (plain, model):
        words.append(each.generate(start, max_new_tokens=6, do_sample=False, pad_token_id=0))
        caches.append(each(start, use_cache=True).past_key_values.layers[0].keys)
    whole, mine = caches
    torch.testing.assert_close(mine, whole[:, [dist.get_rank() // 2]], rtol=1e-6, atol=1e-6)
    return torch.equal(*words)


@pytest.mark.slow
def test_each_rank_caches_its_key_head(four_ranks):
    assert all(four_ranks.run(generated))
