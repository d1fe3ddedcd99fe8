"""Bytes of programs whose allocations are known, and of stacks that keep their activations or compute them again."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.core.execution.communication import NullScheduler
from oases.core.schedule import Schedule, generate
from oases.layers import OverlappedStack
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.profile.memory import StepMemory, formula_units, measure_memory
from oases.testing import RankPool

CPU = torch.device("cpu")
CONFIG = GPTConfig(hidden=32, layers=3, heads=4, sequence=8)
BATCH = 4
UNIT = BATCH * CONFIG.sequence * CONFIG.hidden * 4


def test_exact_bytes_of_a_known_program() -> None:
    before = [torch.empty(10_000)]
    kept: list[Tensor] = []

    def forward() -> Tensor:
        kept.append(torch.empty(1000))
        dropped = torch.empty(5000)
        del dropped
        before.clear()  # there before the step: not its memory
        return torch.empty(250)

    def backward(output: Tensor) -> None:
        kept.clear()
        kept.append(torch.empty(7000))

    # Peak: 7000 and 250 floats; those of the forward pass are 1000 and 5000.
    assert measure_memory(forward, backward, CPU) == StepMemory(kept=4000, peak=29_000)


def test_what_only_autograd_holds_is_counted() -> None:
    x = torch.randn(1000, requires_grad=True)
    # exp keeps its result and sin its input, which is the same memory; cos keeps the result of sin.
    memory = measure_memory(lambda: x.exp().sin().cos(), lambda output: None, CPU)
    assert memory == StepMemory(kept=8000, peak=12_000)


def test_an_output_that_was_there_before_is_not_taken_off() -> None:
    x = torch.randn(1000)
    kept: list[Tensor] = []

    def forward() -> Tensor:
        kept.append(torch.empty(10))
        return x

    assert measure_memory(forward, lambda output: None, CPU) == StepMemory(kept=40, peak=40)


def stack_memory(name: str, recompute: str) -> StepMemory:
    schedule = generate(name, 2 * CONFIG.layers, 2, recompute)
    blocks: list[nn.Module] = transformer_blocks(CONFIG, dist.group.WORLD)
    stack = OverlappedStack(blocks, process_group=dist.group.WORLD, schedule=schedule)
    x, grad = torch.randn(2, BATCH, CONFIG.sequence, CONFIG.hidden)
    x.requires_grad_()
    for _ in range(2):  # the first step prepares what stays
        stack.zero_grad()
        memory = measure_memory(
            lambda: stack.run(x, NullScheduler(allocate_buffers=True)), lambda output: output.backward(grad), CPU
        )
    return memory


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "inputs_kept"),
    [
        # Of every layer its input, the first layer's being the stack's own; or of every block.
        ("sync", CONFIG.layers - 1),
        ("cross_pass", CONFIG.layers - 1),
        ("fine_grained", 2 * CONFIG.layers - 1),
        ("oases", 2 * CONFIG.layers - 1),
    ],
)
def test_recomputation_keeps_inputs_alone(two_ranks: RankPool, name: str, inputs_kept: int) -> None:
    for memory in two_ranks.run(stack_memory, name, "full"):
        assert memory.kept == inputs_kept * UNIT
    for whole in two_ranks.run(stack_memory, name, "none"):
        assert whole.kept > 2 * memory.kept
        assert whole.peak > memory.peak


def test_formula() -> None:
    def units(name: str, recompute: str) -> int | None:
        return formula_units(generate(name, 4, 2, recompute))

    assert [units(name, "full") for name in ("sync", "fine_grained", "cross_pass", "oases")] == [1, 4, 3, 4]
    assert units("sub_pipelined", "full") is None
    assert units("oases", "none") is None
    assert formula_units(Schedule("mine", 2, 1, (), "full")) is None
