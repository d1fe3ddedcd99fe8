"""Unedited models with mixtures of experts under tensor parallelism, against themselves in one process."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from autotp.comparison import gradients_apart
from autotp.zoo import MIXTURES, batch, build
from autotp.zoo_runs import one_step, trained_beside_itself
from torch import nn

import oases
from oases.autotp.experts import Clamp, collections, substitute_experts

pytestmark = pytest.mark.usefixtures("shared_traces")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


SOME = ("mixtral", "qwen2_moe")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES]
)
def test_experts_are_spread_and_train_as_in_one_process(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-5)
        (layers,) = result["report"]["layers"]
        assert layers["experts"] == EXPERTS
        assert (layers["runs"], layers["schedule"]) == ("across layers", "oases")


@pytest.mark.slow
def test_attention_that_assigns_to_parts_of_tensors_is_sharded(two_ranks):
    for result in two_ranks.run(trained_beside_itself, "deepseek_v3", {}):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
        (layers,) = result["report"]["layers"]
        assert {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"} <= set(layers["column"])
        assert "self_attn.o_proj.weight" in layers["row"]
        assert (layers["runs"], layers["schedule"]) == ("across layers", "oases")


def apart(name, changed, options):
    """Relative difference of logits and gradients from one process, and the report."""
    model, parallel = build(name, **changed), build(name, **changed)
    oases.parallelize(parallel, **options)
    expected, got = model(**batch(name)), parallel(**batch(name))
    logits = float((got.logits - expected.logits).detach().abs().max() / expected.logits.detach().abs().max())
    expected.loss.backward()
    got.loss.backward()
    return logits, gradients_apart(model, parallel), parallel.oases_partition.json()["layers"][0]


def of_one_sample(name):
    """Differences of logits of one sample at two lengths; its batch of one is a constant in the graph."""
    model, parallel = build(name), build(name)
    oases.parallelize(parallel)
    tokens = batch(name, length=12)["input_ids"][:1]
    with torch.no_grad():
        return [float((model(t).logits - parallel(t).logits).abs().max()) for t in (tokens[:, :10], tokens)]


@pytest.mark.long
def test_one_sample_at_two_lengths(two_ranks):
    for found in two_ranks.run(of_one_sample, "mixtral"):
        assert max(found) < 1e-5


@pytest.mark.slow
def test_over_four_ranks(four_ranks):
    for logits, gradients, layers in four_ranks.run(apart, "mixtral", {}, {}):
        assert logits <= 1e-5
        assert gradients[0] <= 1e-5, gradients
        assert layers["experts"] == EXPERTS


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changed", "options", "runs", "why"),
    [
        ({}, {"schedule": "layers"}, "inside layers", ""),
        ({"num_experts": 5}, {}, "across layers", "2 ranks do not divide its 5 experts"),
        pytest.param(
            {"hidden_act": "tanh"},
            {},
            "across layers",
            "is not a known MLP",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {},
            {"spec": oases.ParallelSpec(replicate=("*.gate_up_proj",))},
            "across layers",
            "gate_up_proj is replicated by request",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_ways_to_run_and_experts_that_stay_whole(two_ranks, changed, options, runs, why):
    for logits, gradients, layers in two_ranks.run(apart, "qwen2_moe", changed, options):
        assert logits <= 1e-5
        assert gradients[0] <= 1e-5, gradients
        assert layers["runs"] == runs
        assert layers["experts"] == ([] if why else EXPERTS)
        assert why in layers["refused"].get("mlp.experts", "")
        assert "mlp.shared_expert.down_proj.weight" in layers["row"]


@pytest.mark.long
def test_weights_are_cut_and_come_back(two_ranks, tmp_path):
    model = build("mixtral")
    oases.save_pretrained(model, tmp_path / "one")
    expected = float(model(**batch("mixtral")).loss.detach())
    whole = sum(p.numel() for p in model.parameters())
    for loss, held in two_ranks.run(one_step, "mixtral", tmp_path / "one", tmp_path / "two"):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert held < 0.6 * whole
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "two")
    for name, mine in model.state_dict().items():
        assert torch.equal(mine, again.state_dict()[name]), name


class Crowd(nn.Module):
    """Experts without recognisable names; `act` between two matmuls."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.second = nn.Parameter(torch.randn(3, 4, 6))
        self.first = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, rows, who, share):
        out = torch.zeros_like(rows)
        for token, slot in torch.cartesian_prod(*map(torch.arange, who.shape)).tolist():
            member = who[token, slot]
            made = self.second[member] @ self.act(self.first[member] @ rows[token])
            out[token] += share[token, slot] * made
        return out


class Bilinear(nn.Module):
    """Stacked weights, and no experts: its forward is called with something else."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(3, 4, 4)) for _ in range(2))

    def forward(self, x, y, z):
        return x + torch.einsum("hij,bj->bi", self.left, y) + torch.einsum("hij,bj->bi", self.right, z)


def test_experts_are_known_by_what_they_compute():
    crowds = nn.ModuleDict({"relu": Crowd(F.relu), "odd": Crowd(torch.sin), "none": Bilinear()})
    x = torch.randn(2, 4)
    expected = crowds["none"](x, x, x)
    substitute_experts(crowds, 2)
    found = dict(collections(crowds))
    assert (found["relu"].mlp.up, found["relu"].mlp.down) == ("first", "second")
    assert (found["relu"].mlp.gated, found["relu"].mlp.activation) == (False, "relu")
    assert "do not divide its 3 experts" in found["relu"].whole
    assert found["odd"].mlp is None
    torch.testing.assert_close(crowds["none"](x, x, x), expected)


class Hidden(Crowd):
    """Crowd whose function hangs on private attributes. renormalise: shares sum to 1 inside."""

    def __init__(self, act, renormalise=False):
        super().__init__(None)
        self._act, self._renormalise = act, renormalise

    def forward(self, rows, who, share):
        self.act = self._act
        return super().forward(rows, who, share / share.sum(-1, keepdim=True) if self._renormalise else share)


def test_private_attributes_and_shares_that_are_changed_inside_tell_experts_apart():
    crowds = nn.ModuleDict({"relu": Hidden(F.relu), "silu": Hidden(F.silu), "even": Hidden(F.silu, renormalise=True)})
    substitute_experts(crowds, 3)
    found = dict(collections(crowds))
    assert [found[name].mlp.activation for name in ("relu", "silu")] == ["relu", "silu"]
    assert found["even"].mlp is None


class Clamped(nn.Module):
    """Gated experts whose gate and up projection are clamped at `limit`. alpha: of GPT-OSS's gate."""

    def __init__(self, limit, alpha=None):
        super().__init__()
        self.limit = limit
        if alpha is not None:
            self.alpha = alpha
        self.both, self.down = nn.Parameter(torch.randn(4, 8, 4)), nn.Parameter(torch.randn(4, 4, 4))

    def forward(self, rows, who, share):
        out, alpha = torch.zeros_like(rows), getattr(self, "alpha", None)
        for token, slot in torch.cartesian_prod(*map(torch.arange, who.shape)).tolist():
            member = who[token, slot]
            gate, up = (self.both[member] @ rows[token]).chunk(2)
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            middle = F.silu(gate) * up if alpha is None else (up + 1) * gate * torch.sigmoid(alpha * gate)
            out[token] += share[token, slot] * (self.down[member] @ middle)
        return out


@pytest.mark.parametrize("limit", [7.0, 16.0])
@pytest.mark.parametrize("alpha", [None, 1.7])
def test_clamps_beyond_what_small_weights_reach_are_seen(limit, alpha):
    """DeepSeek V4's and MiniMax M3's."""
    crowds = nn.ModuleList([Clamped(limit, alpha)])
    substitute_experts(crowds, 2)
    ((_, found),) = collections(crowds)
    assert found.mlp.clamped == Clamp(limit, alpha)
    assert found.mlp.activation == "silu"
