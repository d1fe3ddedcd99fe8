"""Valid inputs of every parser, and changes of JSON values that keep most of an input valid."""

import json
from random import Random
from typing import Any

from oases.core.schedule import GENERATORS, PIPELINES, format_schedule, generate, generate_pipeline
from oases.plans.expert_schedules import EXPERT_SCHEDULES, generate_experts
from oases.simulator.cluster import cluster_called, known_clusters
from oases.simulator.hardware_file import to_json as hardware_json
from oases_train.config import TrainConfig
from oases_train.plan import plan_from_degrees

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.5, 1e-300, 1e300, "", "x", "\0",
    "oases", "\ud800", "a\nb", "schedule x blocks=2 sub_batches=2\nF 0.0\n",
    "pipeline x stages=2 micro_batches=2\nF 0.0\n", [], [[]], [1], {}, {"": 0}, {"x": {"x": []}}, [None] * 300,
)  # fmt: skip
"""Values that a field rarely expects."""


def mutated(data: Any, random: Random, times: int = 1) -> Any:
    """A copy of JSON data with values replaced, left out, doubled, renamed or exchanged."""
    data = json.loads(json.dumps(data))
    for _ in range(times):
        places = list(_places(data))
        if not places:
            return random.choice(HOSTILE)
        holder, key = random.choice(places)
        other, its = random.choice(places)
        change = random.randrange(6)
        if change == 0:
            holder[key] = random.choice(HOSTILE)
        elif change == 1:
            del holder[key]
        elif change == 2 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif change == 3:
            holder[key] = json.loads(json.dumps(other[its]))
        elif change == 4 and isinstance(holder, dict):
            holder[random.choice(["x", "", "tp", "version", "format", key.upper()])] = holder.pop(key)
        elif type(value := holder[key]) in (int, float):
            holder[key] = random.choice([value + 1, value - 1, 2 * value, -value, value // 2])
    return data


def _places(data: Any) -> Any:
    """(container, key) of every value, depth first."""
    keys = data.keys() if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):
        yield data, key
        yield from _places(data[key])


def plans() -> list[str]:
    """Plans of several kinds, as JSON."""
    sizes: dict[str, Any] = {"hidden": 64, "layers": 4, "heads": 4, "sequence": 16, "batch": 16}
    return [
        plan_from_degrees(TrainConfig(**sizes | changes), ranks).to_json()
        for changes, ranks in (
            ({}, 2),
            ({"degrees": {"data": 2, "pipeline": 2, "tensor": 2}, "micro_batches": 2, "zero": True}, 8),
            ({"degrees": {"pipeline": 2}, "micro_batches": 2, "pipeline_schedule": "interleaved"}, 2),
            ({"degrees": {"data": 2}, "fsdp": True, "recompute": "full"}, 4),
            ({"experts": 4, "expert_hidden": 32}, 2),
        )
    ]


def schedules() -> list[str]:
    """Every schedule, as text."""
    found = [generate(name, 3, 2, recompute) for name in GENERATORS for recompute in ("none", "full")]
    found += [generate_pipeline(name, 2, 4, again) for name in PIPELINES for again in (True, False)]
    found += [generate_experts(name, 2, again) for name in EXPERT_SCHEDULES for again in (True, False)]
    return [format_schedule(schedule) for schedule in found]


def hardware() -> list[str]:
    """Shipped profiles, and one with measured rows."""
    times = {
        "forward": 1.0, "forward_unkept": 1.0, "combine": 0.1, "recompute": 1.0, "recompute_whole": 1.0,
        "combine_backward": 0.1, "backward": 1.0, "weight_gradient": 0.5,
    }  # fmt: skip
    data = json.loads(hardware_json(cluster_called("4x3090")[0]))
    shape = {"hidden": 64, "heads": 4, "sequence": 16, "dtype": "float32", "tp": 2, "samples": 2.0}
    data["blocks"] = [{"kind": "mlp", **shape, **{f"{name}_seconds": value for name, value in times.items()}}]
    data["overheads"] = [shape | {"layers": 2, "sub_batches": 2, "forward_seconds": 0.1, "backward_seconds": 0.1}]
    data["links"]["node"]["samples"] = [{"collective": "all_reduce", "ranks": 2, "bytes": 4096, "seconds": 0.001}]
    shipped = [hardware_json(cluster_called(f"8x{name}")[0]) for name in known_clusters()[:2]]
    return [*shipped, json.dumps(data)]


def traces() -> list[str]:
    """A trace of expert loads."""
    rows = [{"step": step, "layer": layer, "counts": [[3, 1], [0, 4]]} for step in range(2) for layer in range(2)]
    return ["\n".join(map(json.dumps, [{"kind": "oases loads", "version": 1}, *rows])) + "\n"]


def records() -> list[str]:
    """Metadata of a checkpoint."""
    data = {"step": 2, "updates": 2, "sizes": {"hidden": 16}, "data": {"seed": 0}, "losses": [1.0], "format": 4}
    return [json.dumps(data), json.dumps(data | {"plan": {"world": 2}, "random": ["AA=="], "ranks": 2})]
