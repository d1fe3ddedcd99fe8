"""Vocabularies of unedited models, cut in place: the models of transformers train as they did."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from autotp.vocabulary_models import Plain, bart, bert, gemma3, gpt2, llama, opt, t5
from torch import nn

import oases
from oases.autotp.logits import LABEL, VocabularyLogits
from oases.autotp.vocabulary import find_vocabulary, shard_embedding, shard_head, shard_vocabulary
from oases.core.blocks.sharding import Cut, cuts, holders, sharded_parameters


def pair(make):
    """The original and a cut copy."""
    torch.manual_seed(0)
    original = make().eval()  # without dropout
    ours = copy.deepcopy(original)
    shard_vocabulary(ours, find_vocabulary(ours), dist.group.WORLD)
    return original, ours


def batch(model, length=12):
    ids = torch.randint(2, find_vocabulary(model).rows, (2, length))
    ids[0, 0] = 1  # a padding token
    labels = ids.clone()
    labels[1, :5] = -100
    return {"input_ids": ids, "labels": labels}


def gathers():
    return sum(row.collectives for row in oases.report().others if row.where == LABEL)


def require_equal_gradients(original, ours):
    known = cuts(ours)
    theirs = dict(original.named_parameters(remove_duplicate=False))
    for name, parameter in ours.named_parameters(remove_duplicate=False):
        expected = theirs[name].grad
        if id(parameter) in known:
            cut = known[id(parameter)]
            assert parameter.shape[0] < theirs[name].shape[0]
            assert cut.size == theirs[name].shape[0]
            expected = cut.take(expected, dist.get_rank(), dist.get_world_size())
        # A bias of keys has the gradient 0 but for rounding.
        near = 1e-5 * expected.abs().max().item() + 1e-9
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=near, msg=lambda m, n=name: f"{n}: {m}")


def check_model(make, length):
    original, ours = pair(make)
    inputs = batch(original, length)
    before = gathers()
    expected, result = original(**inputs), ours(**inputs)
    torch.testing.assert_close(result["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    expected["loss"].backward()
    result["loss"].backward()
    require_equal_gradients(original, ours)
    assert gathers() == before
    assert isinstance(result["logits"], VocabularyLogits)
    assert result["logits"].shape == expected["logits"].shape
    torch.testing.assert_close(result["logits"].detach(), expected["logits"].detach(), rtol=1e-5, atol=1e-6)
    assert gathers() == before + 1


ALL = [gpt2, llama, gemma3, bert, t5, opt, bart, Plain]


@pytest.mark.parametrize("make", ALL)
def test_loss_and_gradients_are_those_of_the_model(two_ranks, make):
    two_ranks.run(check_model, make, 12)


@pytest.mark.parametrize(("make", "length"), [(gpt2, 30), (t5, 30), (llama, 80)])
def test_many_tokens(two_ranks, make, length):
    """The table is gathered; of 128 tokens or more the head measures its number of chunks."""
    two_ranks.run(check_model, make, length)


@pytest.mark.parametrize("make", [gpt2, bert])
def test_four_ranks_of_unequal_parts(four_ranks, make):
    four_ranks.run(check_model, make, 12)


def check_training(make):
    original, ours = pair(make)
    theirs, mine = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (original, ours))
    inputs, losses = batch(original), []
    for _ in range(10):
        for model, optimizer in ((original, theirs), (ours, mine)):
            loss = model(**inputs)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    torch.testing.assert_close(losses[1::2], losses[::2], rtol=1e-5, atol=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", ALL)
def test_ten_steps_of_adamw(two_ranks, make):
    two_ranks.run(check_training, make)


def check_three_of_four():
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return None
    torch.manual_seed(0)
    original = gpt2().eval()
    ours = copy.deepcopy(original)
    shard_vocabulary(ours, find_vocabulary(ours), group)
    inputs = batch(original)
    expected, loss = original(**inputs).loss, ours(**inputs).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    loss.backward()
    whole = original.lm_head.weight.grad
    part = Cut(0, (97,)).take(whole, dist.get_rank(), 3)
    torch.testing.assert_close(ours.lm_head.weight.grad, part, rtol=1e-5, atol=1e-7)
    return ours.lm_head.weight.shape[0]


def test_a_group_of_three(four_ranks):
    assert four_ranks.run(check_three_of_four) == [33, 33, 31, None]


def check_items_in_batch():
    original, ours = pair(gpt2)
    inputs = batch(original)
    count = (inputs["labels"] != -100).sum()
    expected = original(**inputs, num_items_in_batch=count).loss
    torch.testing.assert_close(ours(**inputs, num_items_in_batch=count).loss, expected, rtol=1e-6, atol=1e-6)
    generated = ours.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=1)
    assert generated.equal(original.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=1))


def test_gradient_accumulation_and_generation_of_transformers(two_ranks):
    two_ranks.run(check_items_in_batch)


def check_structure():
    _, ours = pair(bert)
    table, head = ours.get_input_embeddings(), ours.get_output_embeddings()
    assert head.weight is table.weight
    assert ours.cls.predictions.bias is head.bias
    assert table.num_embeddings == head.out_features == 97
    assert holders(ours) == {id(table.weight): table, id(head.bias): head}
    assert [tuple(x.shape) for _, x, _ in sharded_parameters(ours)] == [tuple(table.weight.shape), head.bias.shape]
    assert "97, 32, padding_idx=0, tensor_parallel=2" in repr(ours)
    assert "out_features=97, bias=True, tensor_parallel=2" in repr(ours)

    _, ours = pair(t5)
    weights = [ours.shared.weight, ours.encoder.embed_tokens.weight, ours.decoder.embed_tokens.weight]
    assert all(weight is ours.lm_head.weight for weight in weights)

    original, ours = pair(gemma3)
    table, theirs = ours.model.embed_tokens, type(original.model.embed_tokens)
    assert isinstance(table, theirs)
    assert isinstance(table, nn.Embedding)
    ids = torch.randint(97, (2, 3))
    for revived in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert type(revived) is type(table)
        torch.testing.assert_close(revived(ids), original.model.embed_tokens(ids))


def test_what_was_shared_is_shared_and_classes_hold(two_ranks):
    two_ranks.run(check_structure)


def check_meta():
    with torch.device("meta"):
        ours = gpt2()
        ours.lm_head.weight.mark = "kept"
    shard_vocabulary(ours, find_vocabulary(ours), dist.group.WORLD)
    weight = ours.lm_head.weight
    assert weight.is_meta
    assert weight is ours.transformer.wte.weight
    assert weight.mark == "kept"
    assert ours.lm_head.shard_segments == ours.transformer.wte.shard_segments == {"weight": (97,)}
    assert ours.lm_head.shard_dims == {"weight": 0}
    assert ours.lm_head.tensor_parallel == 2
    assert ours.lm_head.process_group == dist.group.WORLD
    return weight.shape[0]


def test_weights_on_meta_stay_there(two_ranks):
    assert two_ranks.run(check_meta) == [49, 48]


def check_autocast():
    original, ours = pair(gpt2)
    inputs = batch(original)
    with torch.autocast("cpu", torch.bfloat16):
        expected, result = original(**inputs), ours(**inputs)
    assert result.logits.dtype == expected.logits.dtype == torch.bfloat16
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-2, atol=0)
    result.loss.backward()
    assert ours.lm_head.weight.grad.dtype == torch.float32


def test_autocast(two_ranks):
    two_ranks.run(check_autocast)


def check_replicas(options):
    """Each rank a group of one to DistributedDataParallel, which looks into the outputs."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    original, ours = pair(gpt2)
    replicated = nn.parallel.DistributedDataParallel(ours, process_group=alone, **options)
    inputs = batch(original)
    for _ in range(2):
        original.zero_grad()
        ours.zero_grad()
        original(**inputs).loss.backward()
        replicated(**inputs).loss.backward()
        require_equal_gradients(original, ours)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_data_parallel_replicas(two_ranks, options):
    two_ranks.run(check_replicas, options)


class NotMine(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, input):
        return F.embedding(input, self.weight)


class Hidden(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table.weight


def check_refusals():
    group = dist.group.WORLD
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.* needs the full table"):
            shard_embedding(nn.Embedding(8, 4, **option), group)
    table = nn.Embedding(8, 4)
    shard_embedding(table, group)
    with pytest.raises(ValueError, match="vocabulary-parallel already"):
        shard_embedding(table, group)
    with pytest.raises(ValueError, match="has 1 rows, too few for the tensor-parallel degree 2"):
        shard_head(nn.Linear(4, 1), group)
    hooked = nn.Linear(4, 8)
    hooked.forward = hooked.forward
    with pytest.raises(ValueError, match="was replaced on the object"):
        shard_head(hooked, group)
    with pytest.raises(ValueError, match="Linear of 8 rows has no parameter 'weight'"):
        shard_head(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), group)
    other = NotMine(8, 4)
    shard_embedding(other, group)
    with pytest.raises(RuntimeError, match=r"NotMine does not call super\(\).forward"):
        other(torch.tensor([0, 1]))
    model = Plain()
    model.hidden = Hidden(model.tokens)
    with pytest.raises(ValueError, match="Hidden 'hidden' holds the vocabulary's table as 'table'"):
        shard_vocabulary(model, find_vocabulary(model), group)
    assert type(model.tokens) is nn.Embedding


def test_what_cannot_be_cut_is_refused(two_ranks):
    two_ranks.run(check_refusals)


def test_a_group_of_one_changes_nothing():
    model = Plain()
    shard_vocabulary(model, find_vocabulary(model), None)
    assert type(model.tokens) is nn.Embedding


@pytest.mark.parametrize(
    ("make", "tables", "heads"),
    [
        (gpt2, ["transformer.wte"], ["lm_head"]),
        (llama, ["model.embed_tokens"], ["lm_head"]),
        (gemma3, ["model.embed_tokens"], ["lm_head"]),
        (bert, ["bert.embeddings.word_embeddings"], ["cls.predictions.decoder"]),
        (t5, ["shared", "encoder.embed_tokens", "decoder.embed_tokens"], ["lm_head"]),
        (opt, ["model.decoder.embed_tokens"], ["lm_head"]),
        (Plain, ["tokens"], ["head"]),
        (lambda: Plain(tied=False), ["tokens"], ["head"]),
        (lambda: Plain(vocabulary=12), ["tokens"], ["head"]),
        (lambda: Plain().layers, None, None),
        (lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 3)), ["0"], []),
        (lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 3)), None, None),
    ],
)
def test_find_vocabulary(make, tables, heads):
    found = find_vocabulary(make())
    if tables is None:
        assert found is None
    else:
        assert list(found.tables) == tables
        assert list(found.heads) == heads


def test_a_model_that_has_embeddings_but_no_table():
    class Vision(nn.Module):
        def get_input_embeddings(self):
            return nn.Conv2d(3, 8, 4)

    assert find_vocabulary(Vision()) is None
