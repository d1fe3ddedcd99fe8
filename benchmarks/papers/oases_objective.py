"""The planner's objective as the Oases paper publishes it (arXiv 2305.16121, section 4, and its code), to compare.

Blocks 0 .. n-1 with degrees d_i; f, g forward and backward, c all-reduce of one block and half the local batch:

    forward  = f_0 + sum_{i=1}^{n-2} [max(f_i, c_i) + max(f_{i+1}, c_i)] + max(f_{n-2}, c_{n-2}) + c_{n-1}
    backward = g_0 + the same sum and ends with g + f in the place of f
    change   = k c_i(a) + min(c_i(a), f_{i+1}(b)) from degree a to b > a, k = b / a
               k c_{i+1}(b) + min(c_i(a), g_{i+1}(b)) from a to b < a, k = a / b
    memory   = sum_i [12 b s h + 5 P_i] + runtime <= 0.95 of the device

As read here n counts attention and MLP blocks alone, and all of a sum's term i, f_{i+1} too, is taken at degree d_i,
so that it is a cost of node i; b is the whole local batch, runtime the most of any degree, the device's memory what
its driver gives (24 268 MiB on an RTX 3090). The published times of hidden 3072, 24 layers, on 8 GPUs, batch 8, then
give 14 blocks at degree 2 and 34 at degree 4, 1150.5 ms against 1204.3 ms for degree 4 alone, where smaller degrees
come first, as the published runtime needs it; with the larger degree first 1145.4 ms, since of the last block the
formulas count only the all-reduce, and of the first one only the compute.

    python benchmarks/papers/oases_objective.py --model gpt-1.3b --cluster 8x3090 --global-batch 32

It leaves out contention, launches, the data-parallel all-reduce, the optimizer and the head: the search has them all.

--table FILE takes published block times, in milliseconds by hidden, tensor-parallel degree and batch:

    {"sequence": 1024, "dtype": "float32", "device": "RTX 3090 24 GiB", "gpus": 32, "gpus_per_server": 4,
     "rows": [{"hidden": 1024, "tp": 1, "batch": 1, "attention_forward_ms": ..., "attention_backward_ms": ...,
               "mlp_forward_ms": ..., "mlp_backward_ms": ..., "all_reduce_ms": ..., "runtime_memory_mib": ...}]}

null means that the configuration did not fit. all_reduce_ms is an all-reduce of the batch's activations over all
`gpus`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from oases.cli.options import Parser, fail, require_writable, result_output, write_result
from oases.cli.plan import figures, plan_table, title
from oases.cli.plan_options import (
    add_cluster,
    add_model,
    batch_of,
    cluster_of,
    counts,
    model_of,
    parse_bytes,
    require_count,
)
from oases.errors import UsageError
from oases.files import read_json
from oases.limits import short
from oases.planner.chain import Chain, Solution, solve
from oases.planner.memory import head_bytes, usable_bytes
from oases.planner.predict import Predictor
from oases.plans.gpt import gpt, kind_called
from oases.plans.layered import Model
from oases.plans.plan import Plan, Segment, Stage
from oases.plans.shape import ELEMENT_BYTES, KINDS, LARGEST
from oases.simulator.cluster import cluster_called, known_clusters
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock
from oases.simulator.hardware_file import require_distinct, write
from oases.simulator.links import LinkModel, Sample, fit_link
from oases.simulator.program import Contention
from oases.terminal import console

USABLE = 0.95
"""Share of the device's memory that a plan may fill."""
HEAD_WIDTH = 64
"""Assumed features per head: published tables do not give the number of heads."""
_GIB = 1 << 30


@dataclass(frozen=True)
class PublishedTimes:
    """Seconds of one block for half the local batch, by (kind, degree); of its all-reduce, by degree.

    samples: the whole local batch, by degree. runtime_bytes: what a degree needs besides parameters and activations.
    """

    forward: Mapping[tuple[str, int], float]
    backward: Mapping[tuple[str, int], float]
    all_reduce: Mapping[int, float]
    runtime_bytes: Mapping[int, float]
    samples: Mapping[int, float]

    @property
    def degrees(self) -> tuple[int, ...]:
        """Those that have times, in order."""
        return tuple(sorted(self.all_reduce))

    @staticmethod
    def from_rows(rows: Iterable[Mapping[str, Any]], hidden: int, gpus: int, batch: int) -> PublishedTimes:
        """From rows that hold hidden, tp, batch, the times in ms and runtime_memory_mib; null did not fit.

        gpus, batch: degree t gets batch x t / gpus samples; degrees without a row for half of them and, for the
        runtime's memory, all of them are left out. Raises UsageError if none is left.
        """
        table = {(row["tp"], row["batch"]): row for row in rows if row["hidden"] == hidden}
        forward: dict[tuple[str, int], float] = {}
        backward: dict[tuple[str, int], float] = {}
        all_reduce: dict[int, float] = {}
        runtime: dict[int, float] = {}
        samples: dict[int, float] = {}
        for tp in sorted({tp for tp, _ in table if tp <= gpus}):
            whole = batch * tp / gpus
            half, full = table.get((tp, whole / 2)), table.get((tp, whole))
            if half is None or full is None or None in (*half.values(), full["runtime_memory_mib"]):
                continue
            for kind in KINDS:
                forward[kind, tp] = half[f"{kind}_forward_ms"] / 1e3
                backward[kind, tp] = half[f"{kind}_backward_ms"] / 1e3
            all_reduce[tp], samples[tp] = half["all_reduce_ms"] / 1e3, whole
            runtime[tp] = full["runtime_memory_mib"] * 2**20
        if not all_reduce:
            raise UsageError(f"no published times of hidden {hidden} for a batch of {batch} on {gpus} ranks")
        return PublishedTimes(forward, backward, all_reduce, runtime, samples)

    def node_seconds(self, block: int, num_blocks: int, tp: int) -> float:
        """Terms of one block in the objective's forward and backward sums."""
        kind, after = KINDS[block % 2], KINDS[(block + 1) % 2]
        c, total = self.all_reduce[tp], 0.0
        if block == 0:
            total += self.forward[kind, tp] + self.backward[kind, tp]
        if block == num_blocks - 1:
            total += 2 * c
        for share in (0.0, 1.0):  # the forward pass, then the backward pass, in which g + f stands for f
            own, next_one = (self.forward[each, tp] + share * self.backward[each, tp] for each in (kind, after))
            if 0 < block < num_blocks - 1:
                total += max(own, c) + max(next_one, c)
            if block == num_blocks - 2:
                total += max(own, c)
        return total

    def edge_seconds(self, block: int, tp: int, after: int) -> float:
        """Cost of a change of degree between `block` and the next one."""
        if tp == after:
            return 0.0
        c, next_kind = self.all_reduce[tp], KINDS[(block + 1) % 2]
        if tp < after:
            return after / tp * c + min(c, self.forward[next_kind, after])
        return tp / after * self.all_reduce[after] + min(c, self.backward[next_kind, after])

    def weight(self, model: Model, block: int, tp: int) -> float:
        """Bytes of one block: activations, and parameters with gradient and the optimizer's, five times."""
        h = model.hidden
        cut, whole = (4, 6) if KINDS[block % 2] == "attention" else (8, 7)
        parameters = 4 * (cut * h * h / tp + whole * h)
        return 12 * self.samples[tp] * model.sequence * h + 5 * parameters


def objective(times: PublishedTimes, degrees: Iterable[int]) -> float:
    """Seconds of a step by the published formulas, with degree `degrees[i]` for block i."""
    chosen = tuple(degrees)
    nodes = sum(times.node_seconds(i, len(chosen), tp) for i, tp in enumerate(chosen))
    return nodes + sum(times.edge_seconds(i, *pair) for i, pair in enumerate(pairwise(chosen)))


def best_degrees(times: PublishedTimes, model: Model, device_bytes: float, smaller_first: bool = False) -> Solution:
    """The degree of every block that the published objective likes best, within the published bound of memory.

    device_bytes: of one device, as its driver gives them. smaller_first: no degree follows a larger one, which is
    all that the published runtime executes. Raises InfeasibleError if no choice fits.
    """

    def edge(block: int, tp: int, after: int) -> float:
        return np.inf if smaller_first and tp > after else times.edge_seconds(block, tp, after)

    capacity = USABLE * device_bytes - max(times.runtime_bytes.values())
    return solve(
        Chain.made(
            [times.degrees] * model.num_blocks,
            lambda block, tp: times.node_seconds(block, model.num_blocks, tp),
            lambda block, tp: times.weight(model, block, tp),
            edge,
            capacity,
        )
    )


@dataclass(frozen=True)
class PublishedChoice:
    """A plan and what the published objective says of it: seconds of a step, and of each degree throughout."""

    plan: Plan
    seconds: float
    uniform_seconds: dict[int, float]
    solve_seconds: float


def published_plan(
    model: Model, hardware: Hardware, world: int, global_batch: int, *,
    budget: int | None = None, degrees: Sequence[int] = (), rows: Sequence[Mapping[str, Any]] = (),
) -> PublishedChoice:  # fmt: skip
    """The plan that the published objective likes best: every layer computed again, one micro-batch, two sub-batches.

    budget: bytes that a rank may fill; None takes the share of the device that the paper takes. degrees: to choose
    from; empty means all that fit. rows: of a table of published block times, whose all-reduces and memory of the
    runtime are then taken as they are. Raises UsageError where no degree fits.
    """
    wanted = degrees or [2**power for power in range(world.bit_length())]
    possible = [
        tp
        for tp in wanted
        if world % tp == 0 and model.fits_degree(tp) and hardware.has_block(model, tp)
        and global_batch * tp % world == 0 and global_batch * tp // world >= 2
    ]  # fmt: skip
    if not possible:
        raise UsageError(
            f"the published objective cuts a replica's batch in two; {global_batch} samples on {world} ranks leave "
            f"no degree of {', '.join(map(str, wanted))} with 2 of them; give a larger --global-batch"
        )
    if rows:
        times = PublishedTimes.from_rows([r for r in rows if r["tp"] in possible], model.hidden, world, global_batch)
    else:
        times = _times(model, hardware, world, global_batch, possible)
    started = perf_counter()
    found = best_degrees(times, model, hardware.device.memory_bytes if budget is None else budget / USABLE)
    runs = [(int(str(tp)), len(list(run))) for tp, run in groupby(found.states)]
    segments = tuple(Segment(count, tp, "oases", 2, (count + 1) // 2) for tp, count in runs)
    plan = Plan(model, world, hardware.ranks_per_node, global_batch, 1, (Stage(segments),))
    uniform = {tp: objective(times, [tp] * model.num_blocks) for tp in times.degrees}
    return PublishedChoice(plan, found.cost, uniform, perf_counter() - started)


def _times(model: Model, hardware: Hardware, world: int, global_batch: int, degrees: Sequence[int]) -> PublishedTimes:
    """Times of half a replica's batch. Head and embedding replace the paper's measured runtime memory."""
    forward, backward, all_reduce, runtime, samples = {}, {}, {}, {}, {}
    for tp in degrees:
        whole = global_batch * tp / world
        for kind in KINDS:
            times = hardware.block_times(model, kind_called(kind), tp, whole / 2)
            forward[kind, tp] = times.forward_unkept + times.combine
            backward[kind, tp] = times.combine_backward + times.backward + times.weight_gradient
        all_reduce[tp] = hardware.collective_seconds("all_reduce", tp, model.unit_bytes(whole / 2))
        embedding = model.state_bytes(model.end_parameters(0, model.layers, tp), world // tp, zero=False)
        runtime[tp] = float(head_bytes(model, tp, whole) + embedding)
        samples[tp] = whole
    return PublishedTimes(forward, backward, all_reduce, runtime, samples)


def from_published(data: Any, where: str) -> Hardware:
    """Convert a table of published block times. Raises UsageError for missing or inconsistent fields.

    Assumptions: recomputation takes as long as a forward pass, C and its backward take no time, and B is the whole
    backward pass. The single measured link serves as both links.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("rows"), list) or not data["rows"]:
        raise UsageError(f"{where}: a table of published block times has rows, a list of at least one row")
    sequence, gpus, per_server = (_whole(data, name, where) for name in ("sequence", "gpus", "gpus_per_server"))
    dtype, device = data.get("dtype"), data.get("device")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise UsageError(f"{where}: dtype is {short(dtype)}; known are {', '.join(ELEMENT_BYTES)}")
    if gpus < 2:
        raise UsageError(f"{where}: gpus must be at least 2, between which all_reduce_ms was measured, got {gpus}")
    rows = [_row(row, f"{where}: rows[{number}]") for number, row in enumerate(data["rows"])]
    blocks: list[MeasuredBlock] = []
    reduced: dict[int, list[float]] = {}
    for row in rows:
        for kind in KINDS:
            forward, backward = row[f"{kind}_forward_ms"], row[f"{kind}_backward_ms"]
            if forward is None or backward is None:
                continue
            times = BlockTimes(
                forward=forward / 1e3, forward_unkept=forward / 1e3, combine=0.0, recompute=forward / 1e3,
                recompute_whole=forward / 1e3, combine_backward=0.0, backward=backward / 1e3, weight_gradient=0.0,
            )  # fmt: skip
            heads = max(1, row["hidden"] // HEAD_WIDTH)
            blocks.append(
                MeasuredBlock(kind, row["hidden"], heads, sequence, dtype, row["tp"], float(row["batch"]), times)
            )
        if row["all_reduce_ms"] is not None:
            num_bytes = row["batch"] * sequence * row["hidden"] * ELEMENT_BYTES[dtype]
            reduced.setdefault(num_bytes, []).append(row["all_reduce_ms"] / 1e3)
    if not blocks or not reduced:
        raise UsageError(f"{where}: no row has block times and all_reduce_ms, so nothing can be planned with it")
    samples = [Sample("all_reduce", gpus, size, median(seconds)) for size, seconds in sorted(reduced.items())]
    try:
        cluster = fit_link(samples, Contention())
    except ValueError as error:
        raise UsageError(f"{where}: all_reduce_ms: {error}") from error
    hardware = Hardware(
        name=str(device), device=_device(str(device), dtype, blocks, where), ranks_per_node=per_server,
        node=LinkModel(cluster.startup_seconds, cluster.bytes_per_second), cluster=cluster, blocks=tuple(blocks),
        about=f"Published block times, converted. {data.get('about', '')} Assumed: recomputation is a forward "
        "pass, weight gradients are part of the backward pass; the intra-node link is as fast as the "
        "inter-node link, without contention.",
    )  # fmt: skip
    require_distinct(hardware, where)
    return hardware


def _row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} must be an object, got {short(row)}")
    found: dict[str, Any] = {name: _whole(row, name, where) for name in ("hidden", "tp", "batch")}
    for name in (*(f"{kind}_{pass_}_ms" for kind in KINDS for pass_ in ("forward", "backward")), "all_reduce_ms"):
        if name not in row:
            raise UsageError(f"{where}: field {name!r} is missing; give null for what did not fit")
        value = row[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-9 <= value <= 3.6e6
        ):
            raise UsageError(
                f"{where}: {name} must be a number of milliseconds above 0 and up to an hour, or null, got "
                f"{short(value)}"
            )
        found[name] = value
    return found


def _whole(data: Mapping[str, Any], name: str, where: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}: {name} must be a whole number of at least 1, got {short(value)}")
    if value > LARGEST:
        raise UsageError(f"{where}: {name} must be at most {LARGEST}, got {short(value)}")
    return value


def _device(name: str, dtype: str, blocks: list[MeasuredBlock], where: str) -> Device:
    """Device with memory from its name and rates from a shipped profile, or else from the fastest MLP (lower
    bounds).
    """
    memory = re.search(r"(\d+)\s*Gi?B", name, re.IGNORECASE)
    if memory is None:
        raise UsageError(f"{where}: device {short(name)} does not state its memory; write it as 'RTX 3090 24 GiB'")
    flops = moved = 0.0
    for block in blocks:
        shape, kind = gpt(block.hidden, 1, block.heads, block.sequence, dtype=dtype), kind_called(block.kind)
        done = sum(shape.matmul_flops(kind, block.tp, block.samples))
        touched = 2 * shape.kept_bytes(kind, block.tp, block.samples)
        flops, moved = max(flops, done / block.times.forward), max(moved, touched / block.times.forward)
    words = set(re.findall(r"\w+", name.lower()))
    known = next((cluster_called(f"1x{each}")[0].device for each in known_clusters() if each in words), None)
    return Device(
        name, int(memory[1]) * _GIB, {dtype: flops}, known.bytes_per_second if known else moved,
        known.launch_seconds if known else 0.0,
    )  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    """Print the plan that the published objective likes best, as `oases plan` prints its own."""
    parser = Parser(description="Plan by the objective that the Oases paper publishes.")
    parser.add_argument("--json", metavar="FILE", help="write the plan there; - = to standard output")
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--table", metavar="FILE", help="published block times, in place of --cluster or --profile")
    parser.add_argument("--profile-to", metavar="FILE", help="write the table as a profile, for oases plan")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of one optimizer step")
    parser.add_argument("--degrees", metavar="N,N", help="tensor-parallel degrees to choose from")
    parser.add_argument("--memory", metavar="SIZE", help="what a device may fill (default: the paper's share of it)")
    options = parser.parse_args(given)
    try:
        require_writable("--json", options.json)
        with result_output(options.json):
            _show(options)
    except UsageError as error:
        fail(str(error))


def _show(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    if options.table is not None:
        data = read_json(options.table, "--table", "give a table of published block times")
        hardware, rows = from_published(data, f"--table {options.table}"), data["rows"]
        if options.profile_to is not None:
            write(hardware, options.profile_to)
            return
        world = require_count("--world", options.world or 0)
    else:
        hardware, world = cluster_of(options)
    model, batch = model_of(options), batch_of(options)
    budget = None if options.memory is None else parse_bytes(options.memory)
    choice = published_plan(
        model, hardware, world, batch, budget=budget, rows=rows,
        degrees=() if options.degrees is None else counts(options.degrees),
    )  # fmt: skip
    plan, capacity = Predictor(hardware).with_prediction(choice.plan), usable_bytes(hardware, budget)
    uniform = ", ".join(f"tp {tp} {1e3 * seconds:.1f} ms" for tp, seconds in choice.uniform_seconds.items())
    console.print(
        f"by the published objective {1e3 * choice.seconds:.1f} ms a step, solved in {choice.solve_seconds:.2f} s"
        f"; one degree throughout, whether it fits or not: {uniform}", soft_wrap=True,
    )  # fmt: skip
    console.print(title(plan), soft_wrap=True)
    console.print(plan_table(plan, capacity))
    for line in figures(plan, hardware, capacity):
        console.print(line, soft_wrap=True)
    if options.json is not None:
        write_result(options.json, plan.to_json())


if __name__ == "__main__":
    main()
