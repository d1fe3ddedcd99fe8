"""Plans of large models scaled down in size, not in shape, and models whose compute is emulated by timed waits."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp.configuration import configuration
from oases.errors import UsageError
from oases.extension import DeferredGradients
from oases.layers.weight_gradient import active_deferral
from oases.plans.layered import Model
from oases.plans.plan import Plan, Segment, Stage
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Hardware, MeasuredBlock
from oases_bench.timed_block import sleep_until

_HEADS = ("num_attention_heads", "n_head", "num_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_INNER = ("intermediate_size", "n_inner", "d_ff", "moe_intermediate_size")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_DECODER_LAYERS = "num_decoder_layers"
_MOST_EXPERTS = 8
_LEAST_VOCABULARY = 512


def scaled_configuration(data: Mapping[str, Any], width: int, layers: int, degree: int) -> dict[str, Any]:
    """A config.json's content with about `width` features and `layers` layers; families and ratios stay.

    degree: divides the heads. Heads, key and value heads and inner features shrink like the width; the vocabulary
    like width and layers, so that the head keeps its share of the work. UsageError for a file without sizes.
    """
    found = configuration(data)

    def named(names: tuple[str, ...]) -> tuple[str, int]:
        for name in names:
            if isinstance(data.get(name), int):
                return name, data[name]
        raise UsageError(f"{data.get('model_type')}: its config.json gives none of {', '.join(names)}; add it")

    (heads_name, heads), (width_name, hidden), (layers_name, depth) = map(named, (_HEADS, _WIDTHS, _LAYERS))
    fewer = max(degree, round(width / (hidden // heads) / degree) * degree)
    share = fewer / heads
    made = {**data, heads_name: fewer, width_name: hidden // heads * fewer}
    for name in _INNER:
        if isinstance(data.get(name), int):
            made[name] = max(degree, round(data[name] * share / (8 * degree)) * 8 * degree)
    if isinstance(data.get("num_key_value_heads"), int):
        wanted = max(degree, 2, round(data["num_key_value_heads"] * share))
        made["num_key_value_heads"] = max(n for n in range(1, wanted + 1) if fewer % n == 0)
    if isinstance(data.get("num_experts"), int):
        made["num_experts"] = min(_MOST_EXPERTS, data["num_experts"])
        made["num_experts_per_tok"] = max(1, data["num_experts_per_tok"] * made["num_experts"] // data["num_experts"])
    total = depth + (data.get(_DECODER_LAYERS, depth) if getattr(found, "is_encoder_decoder", False) else 0)
    made[layers_name] = min(max(2, round(depth * layers / total)), layers - 2) if total != depth else layers
    if total != depth:
        made[_DECODER_LAYERS] = layers - made[layers_name]
    words = data["vocab_size"] * share * layers / total
    made["vocab_size"] = max(_LEAST_VOCABULARY, round(words / 64) * 64)
    return made


def scaled_layers(plan: Plan, per_part: int) -> list[int]:
    """Layers of each part of a plan when the largest has `per_part`: in proportion, at least 1."""
    counts = [len(plan.layers_of(part)) for part in plan.parts]
    return [max(1, round(count * per_part / max(counts))) for count in counts]


def scaled_plan(plan: Plan, model: Model, counts: list[int], most_samples: int) -> Plan:
    """The plan for a smaller model: stages, degrees, schedules, micro-batches, sharding and recomputation stay.

    counts: layers of each part. most_samples: of a micro-batch on a replica, a multiple of its sub-batches.
    """
    if model.layers != sum(counts):
        raise UsageError(f"{model.name} has {model.layers} layers, the scaled plan {sum(counts)}; report it")
    segments: list[list[Segment]] = [[] for _ in plan.stages]
    first = 0
    for part, count in zip(plan.parts, counts, strict=True):
        (segment,) = part.segments  # of traced models: one degree
        before = len(plan.layers_of(part))
        again = segment.recomputed_layers
        again = count if again == before else min(count, -(-again * count // before))
        blocks = model.first_block(first + count) - model.first_block(first)
        segments[plan.stage_of(part.number)].append(replace(segment, num_blocks=blocks, recomputed_layers=again))
        first += count
    tp = plan.stages[0].segments[0].tp
    parts = max(segment.parts for stage in plan.stages for segment in stage.segments)
    samples = min(int(plan.samples(tp)), max(parts, most_samples // parts * parts))
    batch = samples * plan.stage_ranks // tp * plan.micro_batches
    stages = tuple(Stage(tuple(each)) for each in segments)
    return replace(plan, model=model, global_batch=batch, stages=stages, prediction=None)


def emulated_hardware(plain: Hardware, model: Model, degrees: tuple[int, ...], flops: float) -> Hardware:
    """The hardware with blocks and a head that take as long as a device of `flops` FLOP/s would.

    What is not in a block takes the time of this machine.
    """
    device = replace(
        plain.device, flops_per_second={model.dtype: flops}, bytes_per_second=flops / 4, launch_seconds=0.0
    )
    rates = replace(plain, device=device, blocks=())
    rows = []
    kinds = [kind for kinds in model.layer_kinds for kind in kinds]
    for tp, samples in itertools.product(degrees, (1.0, 64.0)):
        names: dict[str, BlockTimes] = {}
        for kind in kinds:
            t = rates.block_times(model, kind, tp, samples)
            # A block that waits runs whole when it runs again, and does C's backward in its own.
            names[model.block_name(kind)] = replace(
                t, recompute=t.forward, recompute_whole=t.forward, combine_backward=0.0,
                backward=t.backward + t.combine_backward,
            )  # fmt: skip
        once = model.head_flops(samples, tp) / flops
        names[model.end_name(model.layers)] = BlockTimes(
            once, once, 0.0, once, once, 0.0, backward=2 * once, weight_gradient=0.0
        )
        rows += [
            MeasuredBlock(name, model.hidden, model.heads, model.sequence, model.dtype, tp, samples, times)
            for name, times in names.items()
        ]
    return replace(plain, blocks=tuple(rows))


def emulate_compute(model: nn.Module, layered: Model, hardware: Hardware, degree: int) -> None:
    """Have a parallelized model's blocks and head take the times of `hardware` at this degree, by waits.

    The arithmetic runs, too, and must take less time.
    """
    numbers = {
        f"{each.path}.{at}": first + at
        for first, each in zip(layered.borders, layered.lists, strict=False)
        for at in range(each.layers)
    }
    for each in model.oases_partition.layers:  # type: ignore[union-attr]
        runner = each.runner
        if runner is None:
            raise UsageError(f"{each.name}: its layers do not run across layers, so their compute cannot be emulated")
        for layer, count in Counter(runner.layer_of).items():
            path = runner.layers[layer].path
            planned = layered.first_block(numbers[path] + 1) - layered.first_block(numbers[path])
            if count != planned:
                raise UsageError(f"{path}: it runs as {count} blocks and was planned as {planned}; report it")
        places: dict[int, int] = {}
        for block, layer in zip(runner.stack.blocks, runner.layer_of, strict=True):
            number = layered.first_block(numbers[runner.layers[layer].path]) + places.setdefault(layer, 0)
            places[layer] += 1
            times = partial(hardware.block_times, layered, layered.kind_of(number), degree)
            block.partial = _Partial(block, times)
            block.combine = _Combine(block.combine, times)
    head = model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.Module) and any(True for _ in head.parameters()):
        head.forward = _Head(head.forward, partial(hardware.end_times, layered, layered.layers, degree))


class _Clock:
    """Start of a run of a block, and of its backward pass."""

    begun = backward = 0.0


class _Begin(torch.autograd.Function):
    """At a block's input: starts its clock; in the backward pass waits until its time is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: _Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sleep_until(ctx.clock.backward + ctx.seconds)
        return grad, None, None


class _End(torch.autograd.Function):
    """At a block's result: waits until its time is over; in the backward pass starts its clock."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, clock: _Clock, seconds: float, deferred: DeferredGradients | None, weights: float
    ) -> Tensor:
        ctx.clock, ctx.deferred, ctx.weights = clock, deferred, weights
        sleep_until(clock.begun + seconds)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        ctx.clock.backward = time.perf_counter()
        if ctx.deferred is not None:
            ctx.deferred.note(grad, lambda leaves: time.sleep(ctx.weights))
        return grad, None, None, None, None


class _Partial:
    """`partial` of a block that takes its time."""

    def __init__(self, block: Any, times: Any) -> None:
        self._block, self._run, self._times = block, block.partial, times

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        clock, times = _Clock(), self._times(float(x.shape[0]))
        clock.begun = time.perf_counter()
        # At the call: a stack puts other tensors in the place of parameters.
        deferred = active_deferral(*list(self._block.parameters(recurse=False))[:1])
        backward = times.backward + (0.0 if deferred is not None else times.weight_gradient)
        y = self._run(_Begin.apply(x, clock, backward), *rest)
        result: Tensor = _End.apply(y, clock, times.forward, deferred, times.weight_gradient)
        return result


class _Combine:
    """`combine` of a block that takes its time."""

    def __init__(self, run: Any, times: Any) -> None:
        self._run, self._times = run, times

    def __call__(self, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
        begun = time.perf_counter()
        out: Tensor = self._run(x, y, *rest)
        sleep_until(begun + self._times(float(x.shape[0])).combine)
        return out


class _Head:
    """Forward of a model's head that takes its time."""

    def __init__(self, run: Any, times: Any) -> None:
        self._run, self._times = run, times

    def __call__(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        clock = _Clock()
        forward, backward = self._times(float(x.shape[0]))
        clock.begun = time.perf_counter()
        y = self._run(_Begin.apply(x, clock, backward), *rest, **named)
        return _End.apply(y, clock, forward, None, 0.0)
