"""Each peer against one plain process with the same weights: output, gradients, all-reduces on the wire."""

from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from oases.errors import UsageError
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.testing import RankPool
from oases_bench import baselines
from oases_bench.baselines import BASELINES, make_baseline, parse_baselines, require_baseline
from oases_bench.harness import Ranks
from oases_bench.overlap import OverlapBenchConfig, run_overlap_bench

CONFIG = GPTConfig(hidden=32, layers=3, heads=4, sequence=8)


class Plain(nn.Module):
    """One layer of one process, written out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, sequence, self.heads, 3, hidden // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(-1, -2) * (hidden // self.heads) ** -0.5
        future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.projection(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


def shard_like(whole: Tensor, shard: Tensor) -> Tensor:
    """This rank's part of `whole`, cut where `shard` is smaller."""
    for dim, size in enumerate(shard.shape):
        if size != whole.shape[dim]:
            return whole.chunk(whole.shape[dim] // size, dim)[dist.get_rank()]
    return whole


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def backward(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = module(x)
    output.backward(grad)
    assert x.grad is not None
    return output.detach(), x.grad


def error(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor - reference).abs().max() / reference.abs().max())


def compare(name: str, recompute: str) -> dict[str, float]:
    """Largest relative errors of a peer with weights copied from a plain stack; all-reduces of one step."""
    torch.manual_seed(1)
    plain = nn.Sequential(*[Plain(CONFIG.hidden, CONFIG.heads) for _ in range(CONFIG.layers)])
    blocks = transformer_blocks(CONFIG, dist.group.WORLD)
    ours = [parameter for block in blocks for parameter in block.parameters()]
    with torch.no_grad():
        for whole, shard in zip(plain.parameters(), ours, strict=True):
            whole.add_(torch.randn_like(whole), alpha=0.1)  # biases too: one added twice would not show at zero
            shard.copy_(shard_like(whole, shard))
    peer = make_baseline(name, CONFIG, blocks, dist.group.WORLD, recompute)
    x, grad = torch.randn(2, 4, CONFIG.sequence, CONFIG.hidden)
    expected, expected_grad = backward(plain, x, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output, x_grad = backward(peer, x, grad)
    pairs = [(local(p.grad), q.grad) for p, q in zip(peer.parameters(), plain.parameters(), strict=True)]
    return {
        "output": error(output, expected),
        "input gradient": error(x_grad, expected_grad),
        "weight gradients": max(error(grad, shard_like(whole, grad)) for grad, whole in pairs),
        "all-reduces": sum(event.name == "c10d::allreduce_" for event in profile.events()),
        "parameters": sum(local(p).numel() for p in peer.parameters()) / sum(p.numel() for p in ours),
    }


def skip_unless_installed(name: str) -> None:
    try:
        require_baseline(name, batch=4)
    except UsageError as reason:
        pytest.skip(str(reason))


@pytest.mark.few(1, 2)
@pytest.mark.parametrize(
    ("name", "recompute", "all_reduces_per_layer"),
    # Domino sends every sum twice, once for each half of the batch. A layer computed again stops before its last sum.
    [
        ("torch", "none", 4),
        ("megatron", "none", 4),
        ("domino", "none", 8),
        ("torch", "full", 5),
        ("megatron", "full", 5),
    ],
)
def test_peer_computes_what_one_process_computes(
    two_ranks: RankPool, name: str, recompute: str, all_reduces_per_layer: int
) -> None:
    skip_unless_installed(name)
    for result in two_ranks.run(compare, name, recompute):
        assert result.pop("all-reduces") == all_reduces_per_layer * CONFIG.layers
        assert result.pop("parameters") == 1
        assert max(result.values()) < 1e-4, result


def test_names() -> None:
    assert parse_baselines("all") == BASELINES
    assert parse_baselines("none") == ()
    assert parse_baselines("domino, torch") == ("domino", "torch")
    with pytest.raises(UsageError, match="unknown peer 'alpa'; known are torch, megatron, domino"):
        parse_baselines("torch,alpa")


def test_peer_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(baselines, "distribution", missing)
    with pytest.raises(UsageError, match=r"'megatron' needs megatron-core.*pip install --group peers"):
        require_baseline("megatron", batch=4)


@pytest.mark.parametrize(
    ("batch", "recompute", "message"), [(4, "full", "'domino' cannot recompute"), (1, "none", "raise --batch")]
)
def test_what_domino_cannot_do(monkeypatch: pytest.MonkeyPatch, batch: int, recompute: str, message: str) -> None:
    monkeypatch.setattr(baselines, "distribution", lambda package: None)
    with pytest.raises(UsageError, match=message):
        require_baseline("domino", batch, recompute)


@pytest.mark.long
def test_bench_runs_peers_beside_the_schedules(two_ranks: RankPool) -> None:
    config = OverlapBenchConfig(
        hidden=32, heads=4, layers=2, sequence=8, batch=4, iterations=2, peers="torch", malloc="trim"
    )
    result = two_ranks.run(run_overlap_bench, config, Ranks(), False)[0]
    row = result["peers"]["torch"]
    assert set(row) == {"step_seconds", "forward_seconds", "backward_seconds"}
    assert min(row.values()) > 0
