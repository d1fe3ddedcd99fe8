"""CPU time that the executor adds to a model: its step above plain autograd of the same blocks.

A single process represents all ranks of a group of two over an instantaneous link, so the difference is the host's
work alone: the list of ops, the cut autograd graphs, issuing and waiting. Plain autograd runs the same blocks,
`partial` then `combine`, on the same sub-batches in a plain loop, without communication. Widths are small, because
on an accelerator the kernels run beside the host and only the host's own time matters.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from rich.console import RenderableType
from torch import Tensor, nn

import oases
from oases.autotp.parallelization import parallelize
from oases.core.blocks.batch import BlockInputs
from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.launch.ranks import RankOptions, run_ranks
from oases.layers import OverlappedStack
from oases.limits import MOST_LAYERS
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.models.options import option, require_bytes, require_choices
from oases.terminal import progress, table
from oases.testbed import Backend
from oases_bench.harness import BenchConfig, Benchmark, Result

DEGREE = 2
HEADS = 2
SEQUENCE = 8
LEAST_LAYERS = {"gpt": 1, "llama": 2}
"""Fewest layers that can be built; oases.parallelize finds a list of layers by its repetition."""
_FREE_LINK = Backend("sim", 0.0, math.inf, single_process=True)
_PACKAGE = os.path.dirname(os.path.abspath(oases.__file__)) + os.sep
_MODELS = f"models{os.sep}"
"""Folder of the package whose functions are the model's own work, and not counted."""

Seconds = tuple[float, float]
"""CPU time of the forward and of the backward pass."""


@dataclass(frozen=True)
class HostBenchConfig(BenchConfig):
    """Models, their sizes and the number of rounds."""

    layers: str = option("12,96", "numbers of transformer layers, of two blocks each, comma-separated")
    hidden: int = option(16, "hidden size, features")
    sub_batches: int = option(2, "sub-batches of one sample each")
    model: str = option("gpt,llama", "gpt (built in), llama (of transformers, by oases.parallelize), or both")
    schedule: str = option("oases", "name of the schedule")
    recompute: str = option("none", "activation recomputation", ("none", "full"))
    iterations: int = option(7, "interleaved rounds; medians are reported")

    def __post_init__(self) -> None:
        for name in ("sub_batches", "iterations"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden < 1 or self.hidden % (2 * HEADS):
            raise UsageError(f"hidden {self.hidden} must be a positive multiple of {2 * HEADS}")
        require_choices(self)
        size = 2 * 12 * 4 * self.hidden**2 * max(self.depths)
        require_bytes({"weights and gradients (--hidden, --layers)": size}, f"hidden {self.hidden}")
        for name in self.models:
            if name not in LEAST_LAYERS:
                raise UsageError(f"unknown model {name!r}; known are {', '.join(LEAST_LAYERS)}")
            if min(self.depths) < LEAST_LAYERS[name]:
                raise UsageError(
                    f"layers {self.layers!r}: {name} needs at least {LEAST_LAYERS[name]}; raise --layers"
                )

    @property
    def models(self) -> list[str]:
        """The models asked for."""
        return [name.strip() for name in self.model.split(",") if name.strip()]

    @property
    def depths(self) -> list[int]:
        """The numbers of layers asked for. UsageError for what is not a positive number."""
        texts = [text.strip() for text in self.layers.split(",") if text.strip()]
        if not texts or any(not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_LAYERS for text in texts):
            raise UsageError(
                f"layers {self.layers!r:.80} must be positive numbers up to {MOST_LAYERS}, joined by "
                "commas, e.g. 12,96"
            )
        return [int(text) for text in texts]


class _Gpt:
    """The stack of the built-in GPT."""

    def __init__(self, config: HostBenchConfig, layers: int, group: ProcessGroup) -> None:
        sizes = GPTConfig(hidden=config.hidden, layers=layers, heads=HEADS, sequence=SEQUENCE)
        self.module = OverlappedStack(
            transformer_blocks(sizes, group), process_group=group, schedule=config.schedule,
            sub_batches=config.sub_batches, recompute=config.recompute,  # type: ignore[arg-type]
        )  # fmt: skip
        self.blocks: Sequence[nn.Module] = list(self.module.blocks)

    def run(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)
        return output

    def inputs(self, x: Tensor) -> Sequence[BlockInputs]:
        return ()


class _Llama:
    """The decoder layers of a Llama, called one after the other as its own loop calls them."""

    def __init__(self, config: HostBenchConfig, layers: int, group: ProcessGroup) -> None:
        import transformers

        torch.manual_seed(0)
        self.module: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32, hidden_size=config.hidden, intermediate_size=2 * config.hidden,
                num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
                max_position_embeddings=64, use_cache=False,
            )
        )  # fmt: skip
        parallelize(
            self.module, mesh=group, schedule=config.schedule, sub_batches=config.sub_batches,
            recompute=config.recompute,
        )  # fmt: skip
        report: Any = self.module.oases_partition
        self._runner: Any = report.layers[0].runner
        self.blocks: Sequence[nn.Module] = list(self._runner.stack.blocks)
        self._given: list[Any] = []
        self._layers: list[nn.Module] = list(self.module.get_submodule("model.layers").children())
        handle = self._layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: self._given.append((args[1:], kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            self.module(input_ids=torch.zeros(config.sub_batches, SEQUENCE, dtype=torch.long))
        handle.remove()

    def run(self, x: Tensor) -> Tensor:
        ((args, kwargs),) = self._given
        for layer in self._layers:
            x = pytree.tree_leaves(layer(x, *args, **kwargs))[0]
        return x

    def inputs(self, x: Tensor) -> Sequence[BlockInputs]:
        found: list[Sequence[BlockInputs]] = []

        def note(x: Tensor, inputs: Sequence[BlockInputs]) -> Tensor:
            found.append(inputs)
            return x

        self._runner.run = note
        self.run(x)
        self._runner.run = self._runner.stack
        return found[0]


class _Case:
    """One model of one depth, its data, and the two contestants."""

    def __init__(self, config: HostBenchConfig, name: str, layers: int, group: ProcessGroup) -> None:
        self.config, self.name, self.layers = config, name, layers
        self.model = _Gpt(config, layers, group) if name == "gpt" else _Llama(config, layers, group)
        torch.manual_seed(0)
        self.x, self.grad = torch.randn(2, config.sub_batches, SEQUENCE, config.hidden)
        self._parts = [
            [
                tuple(
                    value[s : s + 1] if per_sample and value.shape[0] > 1 else value
                    for value, per_sample in zip(given.values, given.per_sample, strict=True)
                )
                for given in self.model.inputs(self.x)
            ]
            for s in range(config.sub_batches)
        ]

    def plain(self, x: Tensor) -> Tensor:
        """The same blocks on the same sub-batches by autograd alone."""
        outputs = []
        for part, given in zip(x.split(1), self._parts, strict=True):
            for index, block in enumerate(self.model.blocks):
                values = given[index] if given else ()
                y = block.partial(part, *values)  # type: ignore[operator]
                part = block.combine(part, y, *values)  # type: ignore[operator]
            outputs.append(part)
        return torch.cat(outputs)

    def step(self, run: Callable[[Tensor], Tensor]) -> Seconds:
        """CPU seconds of a forward and a backward pass; leaves the gradients in place."""
        self.model.module.zero_grad()
        x = self.x.clone().requires_grad_()
        start = time.process_time()
        output = run(x)
        between = time.process_time()
        output.backward(self.grad)
        end = time.process_time()
        self.found = [output.detach(), x.grad]
        return between - start, end - between

    def require_same(self) -> None:
        """Raise RuntimeError unless both ways give the same output and gradient: then they did the same work."""
        self.step(self.model.run)
        ours = self.found
        self.step(self.plain)
        for one, other in zip(ours, self.found, strict=True):
            assert one is not None
            assert other is not None
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                raise RuntimeError(
                    f"the {self.name} of {self.layers} layers differs from plain autograd by "
                    f"{float((one - other).abs().max()):.1e}; the two times cannot be compared"
                )

    def calls(self) -> dict[str, Any]:
        """Calls of this package's functions in one forward pass, and the files they are in."""
        counts: dict[str, int] = {}

        def note(frame: Any, event: str, argument: Any) -> None:
            path = frame.f_code.co_filename
            if event != "call" or not path.startswith(_PACKAGE) or path == __file__:
                return
            name = path.removeprefix(_PACKAGE)
            if not name.startswith(_MODELS):
                counts[name] = counts.get(name, 0) + 1

        x = self.x.clone().requires_grad_()
        self.model.run(x)  # what only the first call does is not counted
        sys.setprofile(note)
        try:
            self.model.run(x)
        finally:
            sys.setprofile(None)
        by_file = dict(sorted(counts.items(), key=lambda item: -item[1]))
        found = {"blocks": len(self.model.blocks), "calls": sum(counts.values()), "files": len(counts)}
        return found | {"by_file": by_file}


def run_host_bench(config: HostBenchConfig, shows: bool = True) -> Result:
    """Measure in this process; no other rank is started. A model whose library is missing is left out and named."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the process's CPU time counts all threads
    try:
        found: Result = run_ranks(_measure, (config, shows), RankOptions(DEGREE, _FREE_LINK))
    finally:
        torch.set_num_threads(threads)
    return found


def _measure(config: HostBenchConfig, shows: bool) -> Result:
    group = dist.group.WORLD
    assert group is not None
    missing = {"llama": "transformers"}
    left_out = [name for name in config.models if name in missing and find_spec(missing[name]) is None]
    names = [name for name in config.models if name not in left_out]
    calls = {name: _Case(config, name, LEAST_LAYERS[name], group).calls() for name in names}
    cases = [_Case(config, name, layers, group) for name in names for layers in config.depths]
    for case in cases:
        case.require_same()
    times: list[tuple[list[Seconds], list[Seconds]]] = [([], []) for _ in cases]
    with progress("measuring", config.iterations, shows) as advance:
        for iteration in range(config.iterations):
            for case, (ours, plain) in zip(cases, times, strict=True):
                gc.collect()
                ours.append(case.step(case.model.run))
                plain.append(case.step(case.plain))
            advance(iteration + 1)
    return {
        "config": asdict(config) | {"tp": DEGREE, "sequence": SEQUENCE, "heads": HEADS},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "models": [_row(case, *each) for case, each in zip(cases, times, strict=True)],
        "forward_calls": calls,
        "left_out": {name: f"{missing[name]} is not installed" for name in left_out},
    }


def _row(case: _Case, ours: list[Seconds], plain: list[Seconds]) -> dict[str, Any]:
    """Seconds per (block, sub-batch): medians over the rounds, the difference within each round."""
    places = len(case.model.blocks) * case.config.sub_batches

    def median(seconds: list[float]) -> float:
        return statistics.median(seconds) / places

    pairs = list(zip(ours, plain, strict=True))
    return {
        "model": case.name,
        "layers": case.layers,
        "blocks": len(case.model.blocks),
        "step_seconds": median([sum(one) for one in ours]),
        "plain_seconds": median([sum(one) for one in plain]),
        "above_seconds": median([sum(one) - sum(other) for one, other in pairs]),
        "above_forward_seconds": median([one[0] - other[0] for one, other in pairs]),
        "above_backward_seconds": median([one[1] - other[1] for one, other in pairs]),
    }


_COLUMNS = ("model", "layers", "blocks", "step", "plain autograd", "above it", "forward", "backward")


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per model and depth, the calls of one forward pass below."""
    keys = ("step", "plain", "above", "above_forward", "above_backward")
    rows = [
        (
            row["model"],
            str(row["layers"]),
            str(row["blocks"]),
            *(f"{1e3 * row[f'{key}_seconds']:.3f}" for key in keys),
        )
        for row in result["models"]
    ]
    yield table(_COLUMNS, rows, title="CPU milliseconds per (block, sub-batch)")
    for name, found in result["forward_calls"].items():
        yield (
            f"{name}: {found['calls']} calls of oases in {found['files']} files, forward, {found['blocks']} blocks x "
            f"{result['config']['sub_batches']} sub-batches"
        )
    for name, why in result["left_out"].items():
        yield f"{name} is left out: {why}"
    yield f"Python {result['python']}, torch {result['torch']}"


BENCHMARK = Benchmark(
    "host",
    "CPU time that the executor adds to a model, above plain autograd",
    HostBenchConfig(),
    run_host_bench,
    shown,
    size=None,
)
