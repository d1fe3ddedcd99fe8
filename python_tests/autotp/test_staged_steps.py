"""Steps of models in stages whose batches, trained parameters and labels vary, beside one process."""

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import said
from autotp.staged import mesh_of, shares, sizes
from autotp.zoo import batch, build
from torch import nn

import oases

WORDS, WIDTH = 12, 8


def _by_hand(logits, targets, mask):
    rates = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return -(rates * (targets != -100)).sum() / (targets != -100).sum()


def _divided(logits, targets, mask):
    return (F.cross_entropy(logits, targets, reduction="none") * mask.flatten()).sum() / mask.sum()


def _in_place(logits, targets, mask):
    targets = targets.clone()
    targets[mask.flatten() == 0] = -100
    return F.cross_entropy(logits, targets)


def _pooled(logits, targets, mask):
    """Classes of whole samples: a mean over those places of each that the mask has."""
    sums = (logits.unflatten(0, mask.shape) * mask[..., None]).sum(1)
    return F.cross_entropy(sums / mask.sum(1, keepdim=True), targets)


def _regular(logits, targets, mask):
    """Terms that are means over the targets, and one that depends on no sample."""
    has_loss = targets != -100
    sizes = (logits.logsumexp(-1).square() * has_loss).sum() / has_loss.sum()
    return F.cross_entropy(logits, targets, label_smoothing=0.1) / 2 + 0.01 * sizes + WIDTH


PENALISED = {
    "penalty": lambda logits, targets, mask: F.cross_entropy(logits, targets) + logits.square().mean(),
    "times": lambda logits, targets, mask: F.cross_entropy(logits, targets) * logits.square().mean(),
    "perplexity": lambda logits, targets, mask: F.cross_entropy(logits, targets).exp(),
    "no mean": lambda logits, targets, mask: F.cross_entropy(logits, targets, reduction="none").mean(),
}
"""Losses with other terms than means over targets. "no mean": of all places, with zeros for those left out."""
MASKED = {
    "masked": lambda logits, targets, mask: F.cross_entropy(logits, targets.masked_fill(mask.flatten() == 0, -100)),
    "flags": lambda logits, targets, mask: F.cross_entropy(logits, targets.masked_fill(~mask.flatten(), -100)),
    "by value": lambda logits, targets, mask: F.cross_entropy(logits, targets.masked_fill(targets == 0, -100)),
    "classes": lambda logits, targets, mask: F.cross_entropy(logits, targets, torch.arange(1.0, 13.0).to(logits)),
    "by hand": _by_hand,
    "divided": _divided,
    "in place": _in_place,
    "a part": lambda logits, targets, mask: F.cross_entropy(logits[::5], targets.view_as(mask)[:, 0]),
}
"""Losses of which no weights of micro-batches are known."""
BY_MASK = MASKED | PENALISED | {"pooled": _pooled, "regular": _regular}


class Tagger(nn.Module):
    """Language model of no library. kind: how its loss takes the targets.

    "positional": named `targets`. "two": a second loss over one label a sample. Those of MASKED.
    "own": the tokens themselves, and those of number 0 are padding. "length": the number of tokens stands for no
    target, as in question answering.
    """

    def __init__(self, kind="positional", layers=4):
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
        self.head, self.rater = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 3)

    def forward(self, tokens, targets=None, ratings=None, mask=None):
        h = self.table(tokens)
        for layer in self.layers:
            h = layer(h) + h
        logits = self.head(h)
        if self.kind == "own":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        if self.kind in BY_MASK:
            return BY_MASK[self.kind](logits.flatten(0, 1), targets.flatten(), mask)
        if self.kind == "length":
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=tokens.shape[1])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.kind == "two":
            loss = loss + F.cross_entropy(self.rater(h[:, 0]), ratings)
        return loss


def tagged(kind="positional", samples=8, length=5, seed=0, left_out=True):
    """Arguments of a step: more targets are left out of earlier samples."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, WORDS, (samples, length), generator=generator)
    targets = torch.randint(WORDS, (samples, length), generator=generator)
    for sample in range(samples if left_out else 0):
        left = {"own": 0, "length": length}.get(kind, -100)
        (tokens if kind == "own" else targets)[sample, 2 + sample % (length - 2) :] = left
    more = {
        "two": {"ratings": torch.randint(3, (samples,), generator=generator)},
        "masked": {"mask": torch.ones(samples, length, dtype=torch.int64)},
        "flags": {"mask": torch.ones(samples, length, dtype=torch.bool)},
        "divided": {"mask": torch.ones(samples, length, dtype=torch.int64).tril(0 if left_out else length)},
        "in place": {"mask": torch.ones(samples, length, dtype=torch.int64)},
        "a part": {"mask": torch.ones(samples, length, dtype=torch.int64)},
        "pooled": {"mask": torch.ones(samples, length, dtype=torch.int64).tril()},
    }
    if kind == "pooled":
        targets = targets[:, 0].clamp(min=0)
    return (tokens, *(() if kind == "own" else (targets,))), more.get(kind, {})


def pair(kind, shape, **options):
    """A model in one process and the same in stages."""
    torch.manual_seed(0)
    plain, model = Tagger(kind).double(), Tagger(kind).double()
    model.load_state_dict(plain.state_dict())
    spec = oases.ParallelSpec(inputs=tagged(kind, 2))
    return plain, oases.parallelize(model, mesh=mesh_of(*shape), micro_batches=2, spec=spec, **options)


def mine(model, shape, given):
    """The part of this rank's replica."""
    replica = model.oases_pipeline.mesh.replica(shape[2])
    args, kwargs = given
    cut = {name: value.chunk(shape[1])[replica] for name, value in kwargs.items()}
    return [value.chunk(shape[1])[replica] for value in args], cut


def compare(plain, model, shape, given):
    """A step on both; gradients are equal, and absent where the plain model has none."""
    step(plain, model, given, mine(model, shape, given))


def step(plain, model, given, here):
    """A step of `compare`. here: arguments of this rank."""
    for each in (plain, model):
        each.zero_grad()
    expected = plain(*given[0], **given[1])
    expected.backward()
    torch.testing.assert_close(model.train_step(*here[0], **here[1]), expected.detach(), rtol=1e-10, atol=0)
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        if parameter.grad is None:
            assert wanted is None, name
        elif wanted is None:  # unused by this loss, and by that of other replicas unknown
            assert parameter.requires_grad, name
            assert not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12, msg=name)


def of_many_shapes(shape):
    plain, model = pair("positional", shape)
    for samples, length in ((8, 5), (8, 7), (4, 7), (8, 5)):
        compare(plain, model, shape, tagged(samples=samples, length=length))
        args, _ = mine(model, shape, tagged(samples=16, length=3))
        expected = plain(*tagged(samples=16, length=3)[0]).detach()
        torch.testing.assert_close(model.eval_step(*args), expected, rtol=1e-10, atol=0)
    model.oases_pipeline.close()


def test_batches_may_have_other_shapes_each_time(two_ranks):
    two_ranks.run(of_many_shapes, (2, 1, 1))


@pytest.mark.parametrize("kind", ["positional", "own", "regular"])
def test_targets_are_found_by_what_the_loss_reads(two_ranks, kind):
    two_ranks.run(weighed, kind, (2, 1, 1))


def weighed(kind, shape):
    plain, model = pair(kind, shape)
    compare(plain, model, shape, tagged(kind))
    model.oases_pipeline.close()


def of_lengths():
    """The target that is ignored differs in each batch."""
    plain, model = pair("length", (2, 1, 1))
    for length in (5, 9, 5):
        compare(plain, model, (2, 1, 1), tagged("length", length=length))
    model.oases_pipeline.close()


def test_ignored_targets_may_depend_on_the_batch(two_ranks):
    two_ranks.run(of_lengths)


def refusal_of(kind, shape):
    _, model = pair(kind, shape)
    args, kwargs = mine(model, shape, tagged(kind))
    text = said(lambda: model.train_step(*args, **kwargs))
    model.oases_pipeline.close()
    return text


def refused():
    """Errors of losses that no weights of micro-batches make right."""
    shape, texts = (2, 1, 1), {}
    plain, model = pair("two", shape)
    compare(plain, model, shape, tagged("two", left_out=False))
    args, kwargs = mine(model, shape, tagged("two"))
    texts["two"] = said(lambda: model.train_step(*args, **kwargs))
    texts["items"] = said(lambda: model.train_step(*args, **kwargs, num_items_in_batch=7))
    texts["inference"] = said(torch.inference_mode()(lambda: model.train_step(*args, **kwargs)))
    model.oases_pipeline.close()
    for kind in ("no mean", "penalty", "divided"):
        plain, other = pair(kind, shape)
        compare(plain, other, shape, tagged(kind, left_out=False))
        other.oases_pipeline.close()
    texts |= {kind: refusal_of(kind, shape) for kind in (*MASKED, *PENALISED)}
    return texts


@pytest.mark.long
def test_losses_that_no_weights_make_right_are_refused(two_ranks):
    for texts in two_ranks.run(refused):
        assert "a sum of 2 cross entropies" in texts["two"]
        assert "leave num_items_in_batch out" in texts["items"]
        for kind in PENALISED:
            assert "the loss has other terms than the mean of a cross entropy, and micro-batches" in texts[kind]
        assert "in no_grad() or inference_mode() trains nothing" in texts["inference"]
        for kind in ("masked", "flags", "by value", "in place", "a part"):
            assert "the loss leaves out labels by another input, such as a mask, changes them" in texts[kind]
        for kind in ("divided", "by hand"):
            assert "the loss is divided by a number that is computed from an input" in texts[kind]
        assert "the loss is a mean by weights of classes" in texts["classes"]


def pooled(shape):
    """One sample in each micro-batch, of other lengths: what it is divided by is its own."""
    plain, model = pair("pooled", shape)
    for samples in (2, 4):
        compare(plain, model, shape, tagged("pooled", samples=samples))
    model.oases_pipeline.close()


def test_samples_may_be_divided_by_their_lengths(two_ranks):
    two_ranks.run(pooled, (2, 1, 1))


def with_a_frozen_stage(shape):
    """The first stage trains nothing: its gradients are none, and so are its optimizer's parameters."""
    plain, model = pair("positional", shape)
    for each in (plain, model):
        each.requires_grad_(False)
        each.head.requires_grad_(True)
        each.layers[3].requires_grad_(True)
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=0.1)
    beside = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for seed in range(2):
        compare(plain, model, shape, tagged(seed=seed))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(oases.clip_grad_norm(model, 0.1).to(norm.dtype), norm, rtol=1e-6, atol=0)
        optimizer.step()
        beside.step()
    model.oases_pipeline.close()


def test_a_stage_may_train_nothing(two_ranks):
    two_ranks.run(with_a_frozen_stage, (2, 1, 1))


def frozen_in_turns(shape):
    """Parameters that are frozen, unfrozen and replaced between steps."""
    plain, model = pair("positional", shape)
    for part in ("table", "layers.0", "", "head", "layers.3"):
        for each in (plain, model):
            each.requires_grad_(True)
            if part and any(name == part for name, _ in each.named_modules()):
                each.get_submodule(part).requires_grad_(not part)
        compare(plain, model, shape, tagged())
    here = {name: plain.get_parameter(name).detach() * 1.5 for name, _ in model.named_parameters()}
    model.load_state_dict(here, assign=True, strict=False)
    plain.load_state_dict({name: value * 1.5 for name, value in plain.state_dict().items()})
    compare(plain, model, shape, tagged())
    model.oases_pipeline.close()


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1)], ids=str)
def test_parameters_may_be_frozen_between_steps(two_ranks, shape):
    two_ranks.run(frozen_in_turns, shape)


class Crossed(nn.Module):
    """Two tables that are two heads, too, by names of another order."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head, self.rater = (nn.Linear(WIDTH, WORDS, bias=False) for _ in range(2))
        self.head.weight, self.rater.weight = self.second.weight, self.first.weight

    def forward(self, tokens, targets):
        h = self.first(tokens) + 2 * self.second(tokens)
        for layer in self.layers:
            h = layer(h) + h
        return F.cross_entropy((self.head(h) + self.rater(h).tanh()).flatten(0, 1), targets.flatten())


def crossed(shape):
    torch.manual_seed(0)
    plain, model = Crossed().double(), Crossed().double()
    model.load_state_dict(plain.state_dict())
    spec = oases.ParallelSpec(inputs=tagged(samples=2))
    oases.parallelize(model, mesh=mesh_of(*shape), micro_batches=2, spec=spec)
    compare(plain, model, shape, tagged())
    model.oases_pipeline.close()


def test_stages_may_share_several_weights(two_ranks):
    two_ranks.run(crossed, (2, 1, 1))


class Kept(nn.Module):
    """Weights that both ends of the model read, and that it keeps in containers or reads by index."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.ModuleDict(
            {"word": nn.Embedding(WORDS, WIDTH), "of": nn.ModuleDict({"it": nn.Linear(2, 8)})}
        )
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.first, self.last = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)])
        self.turns, self.last_of_all = list(self.layers), [self.last]

    def forward(self, tokens, targets=None):
        h = self.inputs["word"](tokens) + self.inputs["of"].it(torch.ones(2).to(self.scales[0])) * self.scales[0]
        h = self.first[1](self.first[0](h))
        for layer in self.turns:
            h = layer(h) + h
        h = self.last_of_all[0](h) * self.scales[1] + self.scales[0]
        logits = F.linear(h, self.inputs["word"].weight)
        if targets is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.first[1].bias.square().sum()}


def kept(pipeline):
    """A step, and the error where the pass at parallelize() has had no loss."""
    torch.manual_seed(0)
    plain, models = Kept().double(), [Kept().double() for _ in range(2)]
    for model, inputs in zip(models, (tagged(), ((tagged()[0][0],), {})), strict=True):
        model.load_state_dict(plain.state_dict())
        spec = oases.ParallelSpec(inputs=inputs)
        oases.parallelize(model, mesh=mesh_of(2, 1, 1), micro_batches=4, pipeline=pipeline, spec=spec)
    plain.forward, by_name = lambda *args: Kept.forward(plain, *args)["loss"], tagged()
    compare(plain, models[0], (2, 1, 1), by_name)
    text = said(lambda: models[1].train_step(*by_name[0]))
    for model in models:
        model.oases_pipeline.close()
    return text


@pytest.mark.parametrize("pipeline", ["one_f_one_b", pytest.param("zb_v", marks=pytest.mark.long)])
def test_weights_may_be_kept_and_read_anywhere(two_ranks, pipeline):
    for text in two_ranks.run(kept, pipeline):
        if pipeline == "one_f_one_b":  # with zb_v both ends are on one stage
            assert "the loss, in part 1 of the pipeline, reads first.1.bias of another stage" in text


class Placed(Tagger):
    """A table that is the head, too, and places of tokens, which are those of every sample."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.table.weight

    def forward(self, tokens, targets, places):
        h = self.table(tokens) + torch.sin(places[:, None] * torch.arange(WIDTH).to(self.table.weight))
        for layer in self.layers:
            h = layer(h) + h
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def placed(pipeline):
    """A step with hooks and as many tokens as samples; then errors, and calls of a hook of the table."""
    torch.manual_seed(0)
    plain, model, shape = Placed().double(), Placed().double(), (2, 1, 1)
    model.load_state_dict(plain.state_dict())
    spec = oases.ParallelSpec(inputs=((*tagged()[0], torch.arange(5)), {}))
    oases.parallelize(model, mesh=mesh_of(*shape), micro_batches=8, pipeline=pipeline, spec=spec)
    given, calls, texts = (*tagged(length=8, left_out=False)[0], torch.arange(8)), [], {}
    for each in (plain, model):
        each.table.register_forward_hook(lambda module, args, result: 1.5 * result)
    model.table.register_forward_hook(lambda *_: calls.append(1))
    step(plain, model, (given, {}), (given, {}))
    with torch.no_grad():
        texts["no gradients"] = said(lambda: model.train_step(*given))
    stage = model.oases_pipeline.mesh.stage
    shared = model.head.weight if stage else model.table.weight
    shared.data *= 1 + stage
    texts["copies"] = said(lambda: model.train_step(*given))
    shared.data /= 1 + stage
    return len(calls), texts


@pytest.mark.parametrize("pipeline", ["one_f_one_b", "zb_h1"])
def test_hooks_and_copies_are_those_of_one_process(two_ranks, pipeline):
    (first, texts), (last, others) = two_ranks.run(placed, pipeline)
    assert (first, last) == (8, 0)  # where the table is, once for each micro-batch
    for said_there in (texts, others):
        assert "train_step() in no_grad() or inference_mode() trains nothing" in said_there["no gradients"]
        assert "table.weight on rank 0 and head.weight on rank 1 are copies of one weight" in said_there["copies"]


def frozen_shards(option):
    _, model = pair("positional", (1, 2, 1), **{option: True})
    args, _ = mine(model, (1, 2, 1), tagged())
    losses = [float(model.train_step(*args)) for _ in range(2)]
    model.get_submodule("layers.1").requires_grad_(False)
    return losses, said(lambda: model.train_step(*args))


def frozen_tied():
    """A table that the last stage has, too, frozen where the first stage alone sees it."""
    model = oases.parallelize(build("gpt2", **sizes("gpt2", 4)), mesh=mesh_of(2, 1, 1), micro_batches=2)
    data = shares(batch("gpt2"), (2, 1, 1), model)
    model.train_step(**data)
    model.get_input_embeddings().requires_grad_(False)
    return said(lambda: model.train_step(**data))


@pytest.mark.long
def test_freezing_what_one_stage_alone_sees_ends_on_all(two_ranks):
    first, last = two_ranks.run(frozen_tied)
    for text in (first, last):
        assert "transformer.wte.weight among them, which other stages have" in text


@pytest.mark.parametrize("option", ["fsdp", "zero"])
def test_freezing_sharded_parameters_is_refused(two_ranks, option):
    for losses, text in two_ranks.run(frozen_shards, option):
        assert losses[0] == losses[1]
        assert "were frozen, unfrozen or replaced after parallelize()" in text


def dropped(pipeline):
    """Losses of two steps with dropout in the layers, and the offset of each list's masks."""
    torch.manual_seed(3)
    model = build("llama", **sizes("llama", 4), attention_dropout=0.5).train()
    oases.parallelize(model, mesh=mesh_of(2, 1, 1), micro_batches=2, pipeline=pipeline)
    losses = [float(model.train_step(**shares(batch("llama", seed=step), (2, 1, 1), model))) for step in range(2)]
    model.oases_pipeline.close()
    return losses


@pytest.mark.long
def test_masks_depend_on_no_division_into_stages(two_ranks):
    expected = two_ranks.run(dropped, "gpipe")
    assert two_ranks.run(dropped, "interleaved") == expected


@pytest.mark.long
def test_lists_of_layers_have_masks_of_their_own():
    model = oases.parallelize(build("t5"))
    offsets = [each.runner.stack.first_block for each in model.oases_partition.layers]
    assert len(offsets) == 2
    assert abs(offsets[0] - offsets[1]) > 100


class Peeking(nn.Module):
    """A layer that keeps something of its inside, for others to read."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        self.norm = self.linear(x).square().mean()
        return torch.tanh(self.linear(x))


class Penalised(nn.Module):
    """A loss that reads what layers keep."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Peeking(8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(layer.norm for layer in self.layers)


def penalised():
    torch.manual_seed(0)
    spec = oases.ParallelSpec(inputs=((torch.empty(3, 8),), {}))
    return said(lambda: oases.parallelize(Penalised(), mesh=mesh_of(2, 1, 1), spec=spec).train_step(torch.ones(8, 8)))


def test_a_loss_that_reads_the_inside_of_a_layer_is_refused(two_ranks):
    for text in two_ranks.run(penalised):
        assert "the loss reads what layers.0 computes inside and does not return" in text
