"""A run with experts: replicas times tensor-parallel ranks on one stage, experts spread over all of them."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_size, resolve
from oases.models.moe_gpt import MoEGPT
from oases.moe.placement import homes
from oases.parallel.mesh import Mesh
from oases.train.config import TrainConfig, require_bytes, sizes_of
from oases.train.data import Corpus
from oases.train.degrees import Degrees

DEFAULT_REPLICAS = 2
"""Of a run for which nobody asked for ranks: enough to show what is here."""


def degrees_over(config: TrainConfig, ranks: int) -> Degrees:
    """The degrees in a run of so many ranks: replicas on all that tensor parallelism leaves, unless they are given.

    UsageError where degrees do not give so many, and where sizes do not divide by them.
    """
    given = config.degrees
    if given.pipeline > 1:
        raise UsageError(
            f"{given} and experts {config.experts} do not go together: experts are trained on one stage; leave out "
            "the pipeline"
        )
    tensor = given.tensor or (1 if given.data == 1 else max(1, ranks // given.data))
    data = given.data if given.data > 1 else max(1, ranks // tensor)
    degrees = Degrees(data, 1, tensor)
    degrees.tensor_of(ranks)
    config.require_degree(tensor)
    homes(config.experts, ranks)
    share = data * config.micro_batches
    if config.batch % share:
        raise UsageError(
            f"a batch of {config.batch} does not divide into {config.micro_batches} micro-batches for each of {data} "
            f"replicas; give a multiple of {share} as --batch"
        )
    return degrees


def asked_ranks(config: TrainConfig, launched: int | None, *, one_replica: bool = False) -> int:
    """How many ranks a configuration asks for. launched: those a launcher has started. one_replica: and no more."""
    given = config.degrees
    if launched is not None and given.data == 1 and not one_replica:
        return launched
    data = given.data if given.data > 1 or one_replica else DEFAULT_REPLICAS
    return data * given.pipeline * (given.tensor or 1)


def check(config: TrainConfig, ranks: int) -> tuple[TrainConfig, Corpus]:
    """Everything that can be known before any rank starts: the configuration with its degrees, and the corpus."""
    config = dataclasses.replace(config, degrees=degrees_over(config, ranks))
    if config.device == "cpu":
        hidden = config.hidden
        weights = 4 * hidden**2 + 2 * hidden * (config.experts * config.intermediate + config.shared_hidden)
        need = 4 * 4 * weights * config.layers
        require_bytes(need, f"{config.layers} layers of {config.experts} experts", "take fewer or smaller experts")
    return config, config.check_files(sizes_of(config))


def mesh_of(config: TrainConfig, process_group: ProcessGroup | None, timeout: timedelta | None = None) -> Mesh:
    """The groups of a run over all ranks of `process_group`; they make it together."""
    run = resolve(process_group)
    degree = degrees_over(config, group_size(run)).tensor
    return Mesh([degree], process_group=run, timeout=timeout)


def model_of(config: TrainConfig, process_group: ProcessGroup | None, mesh: Mesh) -> MoEGPT:
    """The model on this rank."""
    model = MoEGPT(
        config.mixture(config.seed),
        process_group=process_group,
        mesh=mesh,
        schedule=config.generated,
        recompute=config.recompute == "full",
        **config.layer_options,
    )
    for layer in model.layers:
        layer.router.loss_scale = 1 / config.micro_batches
    return model
