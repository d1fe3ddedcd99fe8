"""Old names of 0.1: module paths, which warn and lead to the new ones until 0.4, and options that went."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

_SCHEDULE = "ops pipeline schedule sequence tensor text validate"
_EXECUTION = "call executor failure group piece"
_BLOCKS = "batch program randomness sharding stack"
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
    "oases.schedule": (
        "oases.core.schedule",
        _kept("oases.core.schedule", _SCHEDULE)
        | dict.fromkeys(("exchange", "experts"), "oases.plans.expert_schedules"),
    ),
    "oases.execution": (
        "oases.core.execution",
        _kept("oases.core.execution", _EXECUTION)
        | {"agreement": "oases.core.execution.failure", "wire": "oases.core.execution.communication"}
        | {"clock": "oases.distributed.clock"}
        | dict.fromkeys(("compiled", "weight_gradient"), "oases.layers.weight_gradient"),
    ),
    "oases.parallel": (
        "oases.layers",
        _kept("oases.core.blocks", _BLOCKS)
        | _kept("oases.layers", "attention chunks dropout embedding fused_norm linear loss styles")
        | _kept("oases.distributed", _DISTRIBUTED)
        | {
            "autotune": "oases.core.execution.autotune",
            "checks": "oases.core.blocks.block_list",
            "exchanges": "oases.moe.exchange_work",
            **dict.fromkeys(("between", "blocks"), "oases.core.blocks.work"),
            "call": "oases.core.blocks.call",
            "tunings": "oases.core.blocks.chooser",
            "state_shards": "oases.distributed.pieces",
        },
    ),
    "oases.graph": (
        "oases.autotp.model_graph",
        dict.fromkeys(("layer_costs", "layered"), "oases.autotp.costs")
        | dict.fromkeys(("layer_graph", "trace", "trace.repeated"), "oases.autotp.model_graph")
        | {f"trace.{name}": f"oases.autotp.{name}" for name in ("as_run", "configuration")},
    ),
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


REMOVED = {
    "sub_batches": "write their number behind the schedule's name: --schedule oases@4",
    "text_column": "rename the column to text: rename_column of datasets, then save_to_disk",
    "vocabulary": "the tokenizer or --model sets it; a plan for another one: oases plan --vocabulary, then --plan",
    "lora_targets": "all linears get adapters; for others add them by peft, then call oases.parallelize",
    "learning_rate_floor": "rates end at a tenth of the peak; or take --learning-rate-schedule constant",
    "decay_steps": "wsd decays in the last tenth of --steps",
    "weight_decay": "it is 0.1, of matrices; for another one call oases.make_optimizer in a custom training loop",
    "save_error": "a checkpoint that cannot be written is a warning, listed in --json as checkpoints: failed",
    "spike": "--bad-loss skip leaves out steps that are not finite, --clip bounds the others",
    "wandb": "log with --tensorboard DIR, and send that by wandb sync DIR",
    "peak_flops": "divide flops_per_second of --step-log by it",
    "print_every": "--step-log FILE has a line for each step",
    "shared_hidden": "give a model with a shared expert as --model, or build it of oases.OverlappedMoE",
    "gate": "build the model of oases.OverlappedMoE(gate=...)",
    "z_weight": "build the model of oases.OverlappedMoE(z_weight=...)",
    "bias_update_rate": "build the model of oases.OverlappedMoE(bias_update_rate=...)",
    "capacity_factor": "build the model of oases.OverlappedMoE(capacity_factor=...)",
    "expert_memory": "build the model of oases.OverlappedMoE(memory_budget=...)",
    "expert_schedule": "give it as --schedule",
    "experts_mode": "--placement METHOD sends tokens to the experts of --model, over all ranks of a stage",
    "expert_parallel": "--placement METHOD uses all ranks of a stage; fewer: oases.parallelize(expert_parallel=N)",
}
"""Options of training in 0.1, by field, and what to do instead."""


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
