"""Old module paths of 0.1, which warn and lead to the new ones until 0.4."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

_SCHEDULE = "exchange experts ops pipeline schedule sequence tensor text validate"
_EXECUTION = "agreement call clock compiled executor failure group piece weight_gradient"
_BLOCKS = "attention batch checks dropout exchanges fused_norm program randomness sharding stack"
_DISTRIBUTED = (
    "collectives expert_groups fsdp gradient_averaging gradient_clipping gradient_hook guards mesh message_layout "
    "messages optimizer pipeline planned_stack precision replicas reshard shard_map sharded_gradients "
    "total_norm"
)
_CHECKPOINT = "contents files integrity lock metadata parallelized resume retention state writer"
_TRAIN = (
    "callbacks config config_file data expert_options instructions learning_rate "
    "load_balance logs meter metrics model_stage optimizer pipeline_stage plan step_check "
    "tokenizer tokens trainer"
)
_SPARSE = "costs exchange gradient hook reducer sketch wire"


def _kept(home: str, names: str) -> dict[str, str]:
    return {name: f"{home}.{name}" for name in names.split()}


MOVED: dict[str, tuple[str, dict[str, str]]] = {
    "oases.schedule": ("oases.core.schedule", _kept("oases.core.schedule", _SCHEDULE)),
    "oases.execution": (
        "oases.core.execution",
        _kept("oases.core.execution", _EXECUTION) | {"wire": "oases.core.execution.communication"},
    ),
    "oases.parallel": (
        "oases.layers",
        _kept("oases.core.blocks", _BLOCKS)
        | _kept("oases.layers", "chunks embedding linear loss styles")
        | _kept("oases.distributed", _DISTRIBUTED)
        | {
            "autotune": "oases.core.execution.autotune",
            **dict.fromkeys(("between", "blocks"), "oases.core.blocks.work"),
            "call": "oases.core.blocks.call",
            "tunings": "oases.core.blocks.chooser",
            "state_shards": "oases.distributed.pieces",
        },
    ),
    "oases.reporting": ("oases.core.reporting", {}),
    "oases.sparse": ("oases_sparse", _kept("oases_sparse", _SPARSE)),
    "oases.train": (
        "oases_train",
        _kept("oases_train", _TRAIN)
        | {"adapters": "oases_train.adapters", "model_options": "oases.models.options"}
        | {"load_replay": "oases_bench.loads"}
        | {"checkpoint": "oases.checkpoint"}
        | {"checkpoint.coordination": "oases.checkpoint.writer"}
        | {f"checkpoint.{name}": place for name, place in _kept("oases.checkpoint", _CHECKPOINT).items()},
    ),
}
"""New home of each old package, and of each of its modules."""


def forward(old: str) -> Callable[[str], Any]:
    """Make the modules of an old package importable under their old names; return its `__getattr__`.

    Emits a FutureWarning that names the new home.
    """
    home, modules = MOVED[old]
    warnings.warn(f"{old} is {home} now; the old path goes with oases 0.4", FutureWarning, stacklevel=3)
    for name, place in modules.items():
        sys.modules[f"{old}.{name}"] = module = importlib.import_module(place)
        if "." not in name:
            setattr(sys.modules[old], name, getattr(importlib.import_module(home), name, module))

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    return get
