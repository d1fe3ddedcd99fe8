"""One GPU measured in a few minutes: the kernels beside its copy bandwidth, a matmul cut in two, overlap.

The link is simulated (`sim`, one process for all ranks), so one GPU is enough; its bandwidth is set so that the
communication takes a given share of the compute measured before.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import RenderableType

from oases.distributed.clock import Clock
from oases.errors import UsageError
from oases.files import write_text
from oases.kernels import bias_gelu, permute, swiglu
from oases.kernels.norm import bias_dropout_residual_norm
from oases.kernels.sparse import sketch_encode
from oases.launch.ranks import RankOptions, run_ranks
from oases.profile.overlap import OverlapBench
from oases.terminal import console
from oases.testbed import Backend
from oases_bench.harness import BenchConfig, Benchmark, Ranks
from oases_bench.overlap import OverlapBenchConfig, run_overlap_bench
from oases_train.config import option

Result = dict[str, Any]
_COMMON: dict[str, Any] = {
    "batch": 8, "dtype": "bfloat16", "device": "cuda", "schedules": "sync,oases@2,oases,auto", "iterations": 5,
}  # fmt: skip
GPTS: dict[str, dict[str, Any]] = {
    "GPT 1.3B": _COMMON | {"hidden": 2048, "heads": 16, "layers": 6, "sequence": 1024, "recompute": "full"},
    "GPT 6.7B": _COMMON | {"hidden": 4096, "heads": 32, "layers": 16, "sequence": 2048},
}
"""Layers as wide as those of two GPTs. What is exposed at the ends of a pass weighs more where layers are fewer."""
TENSOR_PARALLEL = 4
RATIOS = (0.5, 1.0)
"""Communication over compute."""
KERNELS = ("norm epilogue", "bias + GELU", "SwiGLU", "permute", "sketch encode")
WIDE: dict[str, Any] = GPTS["GPT 6.7B"] | {"layers": 2, "schedules": "oases"}
"""Layers at whose width the host must be faster than the GPU."""
SEQUENCES = (1024, 2048, 4096)
"""Tokens per sample of them."""
NOT_WORK = ("watch_clock", "ncclDevKernel")
"""Kernels that wait, for a simulated link or for other ranks."""


def seconds(work: Callable[[], Any], repetitions: int = 20) -> float:
    """Median time of `work` on the GPU, which is held until its host has queued it."""
    clock, times = Clock(torch.device("cuda")), []
    for _ in range(repetitions + 3):
        clock.hold("work")
        start = clock.mark()
        work()
        end = clock.mark()
        clock.queued("work")
        times.append(clock.seconds(start, end))
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of a gigabyte."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def norm_epilogue(copy: float) -> Result:
    """The fused epilogue beside the copy bandwidth and beside the same by torch's own ops."""
    rows, n = 16384, 4096
    y, x = torch.randn(2, rows, n, device="cuda", dtype=torch.bfloat16)
    bias, weight, norm_bias = torch.randn(3, n, device="cuda", dtype=torch.bfloat16)

    def eager() -> None:
        out = x + F.dropout(y + bias, 0.1)
        F.layer_norm(out, (n,), weight, norm_bias)

    with torch.no_grad():
        fused = seconds(
            lambda: bias_dropout_residual_norm(y, x, bias=bias, weight=weight, norm_bias=norm_bias, p=0.1, seed=1)
        )
        return _beside(copy, 4 * y.nbytes, fused) | {"over_eager": seconds(eager) / fused}


def activation(copy: float, gated: bool) -> Result:
    """Bias + GELU, which reads and writes as much, or SwiGLU, which reads twice what it writes."""
    rows, n = 16384, 8192
    x, bias = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda").bfloat16()

    def eager() -> None:
        if gated:
            F.silu(x[:, : n // 2]) * x[:, n // 2 :]
        else:
            F.gelu(x + bias, approximate="tanh")

    with torch.no_grad():
        fused = seconds((lambda: swiglu(x)) if gated else (lambda: bias_gelu(x, bias)))
        return _beside(copy, x.nbytes * (3 if gated else 4) // 2, fused) | {"over_eager": seconds(eager) / fused}


def expert_permute(copy: float) -> Result:
    """Tokens to experts: every row is read and written once per expert it goes to."""
    tokens, n, k, experts = 16384, 4096, 2, 64
    x = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(experts, (tokens, k), device="cuda")
    with torch.no_grad():
        return _beside(copy, 2 * k * x.nbytes, seconds(lambda: permute.permute(x, ids, experts, check=False)))


def encode(copy: float) -> Result:
    """Values are read once and added to a table, read and written, in each of its rows.

    The order in which they are added takes a stable sort of the cells: a pass for each byte of an int64, which reads
    and writes cells and places.
    """
    keys, n, rows = 1 << 18, 64, 3
    positions = torch.randperm(1 << 22, device="cuda")[:keys]
    values = torch.randn(keys, n, device="cuda")
    cell = torch.int64.itemsize
    moved = values.nbytes * (1 + 2 * rows) + rows * keys * cell * 2 * (2 * cell)
    return _beside(copy, moved, seconds(lambda: sketch_encode(positions, values, rows, keys, 0)))


def chunked_matmul() -> Result:
    """Matmul of 8192 x 8192 in two halves against the whole."""
    size = 8192
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    halves = list(zip(a.chunk(2), out.chunk(2), strict=True))
    whole = seconds(lambda: torch.mm(a, b, out=out))
    cut = seconds(lambda: [torch.mm(part, b, out=into) for part, into in halves])
    return {"seconds": whole, "cut_seconds": cut, "of_whole": whole / cut, "flops": 2 * size**3 / whole}


def host_beside_gpu(sequence: int) -> Result:
    """Host time and GPU time of an op of a wide stack's list, and the share of a step in which the GPU computes."""
    config = OverlapBenchConfig(**WIDE | {"sequence": sequence})
    result: Result = run_ranks(_host_beside_gpu, (config,), _ranks(1e12))
    return result


def _host_beside_gpu(config: OverlapBenchConfig) -> Result:
    assert dist.group.WORLD is not None, "run_ranks has made it"
    bench = OverlapBench(config, dist.group.WORLD)
    x = bench.x.clone().requires_grad_()

    def step() -> None:
        bench.stack.run(x, bench.scheduler).backward(bench.grad)

    walls, hosts = [], []
    for _ in range(3 + config.iterations):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - began)  # nothing in a step waits for the GPU
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - began)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    busy = busy_seconds((event.name, event.time_range.start, event.time_range.end) for event in profile.events())
    ops, wall = len(bench.stack.schedule.ops), statistics.median(walls[3:])
    return {
        "ops": ops, "host_seconds_per_op": statistics.median(hosts[3:]) / ops, "gpu_seconds_per_op": busy / ops,
        "step_seconds": wall, "busy": busy / wall,
    }  # fmt: skip


def busy_seconds(kernels: Iterable[tuple[str, float, float]]) -> float:
    """Seconds in which one kernel at least computes. kernels: name, begin and end in microseconds."""
    total, until = 0.0, -float("inf")
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if not any(wait in name for wait in NOT_WORK):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
    return total / 1e6


def hidden(model: str, ratio: float) -> Result:
    """The overlap benchmark of a model of GPTS where communication takes `ratio` of the compute."""
    config, around = OverlapBenchConfig(**GPTS[model]), Ranks(TENSOR_PARALLEL)
    first = replace(config, schedules="sync", iterations=3)
    probe = run_ranks(run_overlap_bench, (first, around, False), _ranks(1e12))
    reduced = 2 * 2 * config.layers * config.batch * config.sequence * config.hidden * torch.bfloat16.itemsize
    sent = 2 * (TENSOR_PARALLEL - 1) / TENSOR_PARALLEL * reduced
    bandwidth = sent / (ratio * probe["compute_seconds"])
    result: Result = run_ranks(run_overlap_bench, (config, around, False), _ranks(bandwidth))
    return result | {"bandwidth": bandwidth}


def _ranks(bandwidth: float) -> RankOptions:
    return RankOptions(TENSOR_PARALLEL, Backend("sim", 20e-6, bandwidth, single_process=True))


def _beside(copy: float, moved: int, time: float) -> Result:
    return {"seconds": time, "bytes_per_second": moved / time, "of_copy": moved / time / copy}


@dataclass(frozen=True)
class GpuBenchConfig(BenchConfig):
    """Where the result goes."""

    report: str | None = option(None, "write a dated Markdown report there")


def run_gpu_bench(config: GpuBenchConfig, shows: bool) -> Result:
    """Everything, in this process. UsageError without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("this benchmark measures a GPU, and this torch sees none; run it where there is one")
    if dist.is_initialized():
        raise UsageError("this benchmark makes its own groups; start it without torchrun")
    on_step: Callable[[object], None] = console.print if shows else lambda what: None
    on_step("copy bandwidth")
    copy = copy_bandwidth()
    result: Result = {"machine": machine(), "copy_bytes_per_second": copy}
    parts: dict[str, Callable[[], Result]] = {
        "norm epilogue": lambda: norm_epilogue(copy),
        "bias + GELU": lambda: activation(copy, gated=False),
        "SwiGLU": lambda: activation(copy, gated=True),
        "permute": lambda: expert_permute(copy),
        "sketch encode": lambda: encode(copy),
        "product cut in two": chunked_matmul,
        **{f"host beside GPU, sequence {each}": partial(host_beside_gpu, each) for each in SEQUENCES},
        **{name: partial(hidden, *cell) for name, cell in _overlaps().items()},
    }
    for name, measure in parts.items():
        on_step(name)
        result[name] = measure()
    if config.report is not None:
        write_text(config.report, markdown(result), "--report")
    return result


def _overlaps() -> dict[str, tuple[str, float]]:
    return {
        f"{model}, communication = {ratio} x compute": (model, ratio) for model in GPTS for ratio in reversed(RATIOS)
    }


def machine() -> dict[str, str]:
    """Versions and device of the measurement."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def markdown(result: Result) -> str:
    """The report, dated today."""
    date = datetime.date.today().isoformat()
    lines = [
        f"# One GPU, {date}",
        "",
        ", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ".",
        "",
    ]
    lines += ["| what | measured | beside |", "|---|---|---|"]
    lines += [f"| copy | {result['copy_bytes_per_second'] / 1e9:.0f} GB/s | |"]
    for name in KERNELS:
        row = result[name]
        eager = f", {row['over_eager']:.2f} x torch's own ops" if "over_eager" in row else ""
        lines += [f"| {name} | {row['bytes_per_second'] / 1e9:.0f} GB/s | {row['of_copy']:.2f} of the copy{eager} |"]
    product = result["product cut in two"]
    lines += [
        f"| product of 8192 cubed, bf16 | {product['flops'] / 1e12:.0f} TFLOP/s | "
        f"cut in two {product['of_whole']:.3f} |"
    ]
    for each in SEQUENCES:
        host = result[f"host beside GPU, sequence {each}"]
        what = f"host per op, hidden {WIDE['hidden']}, sequence {each}"
        lines += [
            f"| {what} | {1e6 * host['host_seconds_per_op']:.0f} us | GPU "
            f"{1e6 * host['gpu_seconds_per_op']:.0f} us per op, busy {host['busy']:.2f} of the step |"
        ]
    for cell in _overlaps():
        for name, row in result[cell]["schedules"].items():
            share = "-" if row["hidden"] is None else f"{row['hidden']:.2f}"
            lines += [
                f"| {cell}: {name} | {1e3 * row['step_seconds']:.1f} ms | hidden {share}, "
                f"{row['of_ideal']:.2f} of the ideal |"
            ]
    return "\n".join(lines) + "\n"


def shown(result: Result) -> Iterator[RenderableType]:
    """The report."""
    yield markdown(result)


BENCHMARK = Benchmark(
    "gpu",
    "one GPU: kernels beside its copy bandwidth, and what a simulated link leaves exposed",
    GpuBenchConfig(),
    run_gpu_bench,
    shown,
    size=None,
)
