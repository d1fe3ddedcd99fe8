"""LoRA in training runs: adapters added through peft before the model is sharded, and written as peft writes them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oases.checkpoint.files import export, newest_of
from oases.checkpoint.metadata import Metadata
from oases.errors import UsageError, make_folder

ALL_LINEAR = "all-linear"
"""Targets of adapters: all linears but the head."""
_NAME = "default"
"""Name that peft gives a model's first adapter."""
SCALING = 2
"""Factor of an adapter's product, alpha / rank."""


def require_adapters(rank: int, model: str | None, weights: str | None) -> None:
    """Raise UsageError for adapters of a model without weights. model, weights: their paths; None for none."""
    if rank and weights is None:
        what = "the built-in GPT" if model is None else f"--model {model!r}, a folder without safetensors,"
        raise UsageError(
            f"lora_rank {rank} trains adapters of given weights alone, and {what} has none; give --model a folder "
            "with weights, or leave out --lora-rank"
        )


def lora_config(rank: int, targets: str = ALL_LINEAR, task: str = "CAUSAL_LM", base: str | None = None) -> Any:
    """LoraConfig of peft. targets: names of modules with commas between, or ALL_LINEAR. base: path of the model.

    UsageError where peft is not installed.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise UsageError(f"lora_rank {rank} needs peft; run pip install peft") from error
    chosen = targets if targets == ALL_LINEAR else [name.strip() for name in targets.split(",")]
    return peft.LoraConfig(
        r=rank, lora_alpha=SCALING * rank, target_modules=chosen, task_type=task, base_model_name_or_path=base,
    )  # fmt: skip


def add_adapters(model: nn.Module, config: Any, device: torch.device) -> nn.Module:
    """Freeze a model, on meta, and add adapters with initial values on `device`; returns it as a PeftModel."""
    peft = importlib.import_module("peft")
    layers = importlib.import_module("peft.tuners.lora")
    adapted: nn.Module = peft.get_peft_model(model, config)
    for part in adapted.modules():
        if isinstance(part, layers.LoraLayer):
            for name in part.adapter_layer_names:
                getattr(part, name).to_empty(device=device)
            part.reset_lora_parameters(_NAME, config.init_lora_weights)
    return adapted


def export_adapter(checkpoint: str | Path, folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Write the adapters of a checkpoint to a folder that peft loads; return their shapes by name.

    UsageError as of `export`, and for a folder that cannot be made.
    """
    settings = Metadata.read(newest_of(checkpoint)).config
    path = make_folder(folder, "adapter folder")
    shapes = export(checkpoint, path / "adapter_model.safetensors", _named)
    both = {part for name in shapes for part in name.split(".") if part in ("encoder", "decoder")}
    task = "SEQ_2_SEQ_LM" if len(both) == 2 else "CAUSAL_LM"
    targets = settings.get("lora_targets", ALL_LINEAR)  # an option of 0.1
    made = lora_config(settings["lora_rank"], targets, task, settings["model"])
    made.save_pretrained(str(path))
    return shapes


def _named(stored: list[str]) -> dict[str, str]:
    """Names of a checkpoint's adapter tensors by their names in a file of peft."""
    return {name.replace(f".{_NAME}.", "."): name for name in stored if ".lora_" in name and f".{_NAME}." in name}
