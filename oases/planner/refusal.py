"""Why no plan fits, and which smallest changes would make one fit."""

from __future__ import annotations

import math
from dataclasses import replace

from oases.errors import UsageError
from oases.planner.predict import Predictor
from oases.planner.runs import Runs
from oases.planner.search import SettingSearch
from oases.planner.space import settings
from oases.simulator.quantities import bytes_text, count_text


class NoPlanError(UsageError):
    """No plan fits the memory. The message says which smallest change makes one fit."""


def refusal(runs: Runs, world: int, global_batch: int, capacity: int) -> str:
    """Why nothing fits, and the smallest single changes that make something fit."""
    model, least = runs.model, _least_bytes(runs, world, global_batch, capacity)
    others = {
        "recomputation (leave out --no-recompute)": (model, replace(runs.space, recompute=True)),
        "a sharded optimizer (leave out --no-zero)": (model, replace(runs.space, zero=(False, True))),
    }
    if not runs.hardware.blocks and "bfloat16" in runs.hardware.device.flops_per_second:
        others["bfloat16 instead of float32"] = (replace(model, dtype="bfloat16"), runs.space)
    changes = [
        change
        for change, (shape, space) in others.items()
        if (shape.element_bytes, space) != (model.element_bytes, runs.space)
        and _least_bytes(Runs(shape, runs.hardware, space), world, global_batch, capacity) <= capacity
    ]
    for ranks in (world * 2**power for power in range(1, 7)):
        if _least_bytes(runs, ranks, global_batch, capacity) <= capacity:
            changes.append(f"{ranks} devices instead of {world}")
            break
    for batch in (global_batch // 2**power for power in range(1, 11)):
        if batch >= 1 and _least_bytes(runs, world, batch, capacity) <= capacity:
            changes.append(f"a global batch of {batch} instead of {global_batch}")
            break
    unit = 2**30 if least >= 2**30 else 2**20
    needed = bytes_text(least if math.isinf(least) else math.ceil(10 * least / unit) * unit / 10)
    changes.append(f"{needed} per device")
    return (
        f"no plan fits: {model.name} with {count_text(model.num_parameters)} parameters on {world} devices needs at "
        f"least {needed} on each, and {bytes_text(capacity)} may be filled. It would fit with: "
        + "; or ".join(changes)
    )


def _least_bytes(runs: Runs, world: int, global_batch: int, capacity: int) -> float:
    space = runs.space
    if "one_f_one_b" in space.pipelines:  # none holds less
        space = replace(space, pipelines=("one_f_one_b",))
    try:
        options = list(settings(runs.model, runs.hardware, world, global_batch, space))
    except UsageError:
        return math.inf
    predictor = Predictor(runs.hardware)
    searches = [SettingSearch(setting, runs, capacity, predictor) for setting in options]
    lightest = min(searches, key=SettingSearch.smallest_bytes)
    return max(lightest.smallest_bytes(), lightest.peak_of_lightest())
