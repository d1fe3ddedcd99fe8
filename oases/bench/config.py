"""What an overlap benchmark is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from oases.bench.peers import parse_peers, require_peer
from oases.errors import UsageError
from oases.schedule import LayerOf, Schedule, sequence_parallel
from oases.train.config import (
    WIRE_DTYPES,
    ModelOptions,
    option,
    require_device,
    require_memory,
    require_seed,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class OverlapConfig(ModelOptions):
    """One overlap benchmark: a stack of transformer layers, forward and backward."""

    hidden: int = option(768, "width of the model, features")
    layers: int = option(3, "transformer layers")
    sequence: int = option(256, "tokens per sample")
    batch: int = option(4, "samples per step")
    model: str | None = option(
        None, "time the layers of this unedited model instead: a config.json of transformers, or a folder with one"
    )
    beside_gpt: bool = option(False, "with --model: the built-in GPT of its sizes besides, in the same run")
    schedules: str = option(
        "sync,oases",
        "schedules to compare, by name (oases@4: four sub-batches; oases:bfloat16: sums sent in that type; "
        "oases:sequence: sequence-parallel; auto: chosen by measuring) or path, joined by commas",
    )
    peers: str = option("none", "who else runs: all, none, or some of torch, megatron, domino joined by commas")
    iterations: int = option(7, "interleaved repetitions; medians are reported")
    seed: int = option(0, "seed of weights and inputs")
    device: str = option("cpu", "cpu or cuda")
    dtype: str = option("float32", "type of weights and activations: float32, bfloat16 or float16")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1:
            raise UsageError(f"iterations must be at least 1, got {self.iterations}")
        require_seed(self.seed)
        require_device(self.device)
        parse_peers(self.peers)  # names the unknown one
        if self.beside_gpt and self.model is None:
            raise UsageError("--beside-gpt runs the built-in GPT beside a model; give it with --model")
        if self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")

    @property
    def names(self) -> list[str]:
        """The schedules asked for, `sync` among them: the others are measured against it."""
        names = [name.strip() for name in self.schedules.split(",") if name.strip()]
        return names if "sync" in names else ["sync", *names]

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The peers asked for."""
        return parse_peers(self.peers, self.batch, self.recompute)

    def contestant(self, name: str, layer_of: LayerOf = None) -> tuple[Schedule, torch.dtype | None]:
        """The schedule called `name` and the type its sums are sent in: NAME[@N][:sequence][:bfloat16], or a path.

        layer_of: each block's layer; None where a layer is two blocks.
        """
        plain, *suffixes = [name] if Path(name).is_file() else name.split(":")
        resolved, dtype = self.schedule_or_auto(plain, layer_of), None
        if resolved == "auto":
            raise UsageError(f"unknown schedule {name!r}; auto takes no suffix")
        schedule = resolved
        for suffix in suffixes:
            if suffix == "sequence":
                schedule = sequence_parallel(schedule)
            elif WIRE_DTYPES.get(suffix) is not None:
                dtype = WIRE_DTYPES[suffix]
            else:
                known = ", ".join(["sequence", *(key for key, value in WIRE_DTYPES.items() if value is not None)])
                raise UsageError(f"schedule {name!r}: unknown {suffix!r}; what may follow a colon is {known}")
        return schedule, dtype

    def check(self, degree: int) -> None:
        """Everything that can be known before any rank starts."""
        if degree < 2:
            raise UsageError(f"--tp {degree} communicates nothing, so there is nothing to hide; give at least 2")
        if self.model is None or self.beside_gpt:
            self.require_degree(degree)
            if self.device == "cpu":
                require_memory(self, degree)
        for name in self.names:
            if name == "auto" or (self.model is not None and Path(name).is_file()):
                continue  # of how many blocks a model's layers are, the ranks will know
            if self.contestant(name)[0].sequence_parallel and self.sequence % degree:
                raise UsageError(
                    f"schedule {name!r} cuts the sequence over the ranks, and {self.sequence} tokens do not divide "
                    f"by --tp {degree}; give a --sequence that does"
                )
        for name in self.peer_names:
            require_peer(name, self.batch, self.recompute)
