"""A whole profile: device, links, contention and blocks of one machine or cluster, measured on all its ranks."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from oases.errors import UsageError
from oases.launch.ranks import require_agreement
from oases.profile.compute import OVERHEAD_SUB_BATCHES, BlockBench
from oases.profile.config import ProfileConfig
from oases.profile.contention import ContentionBench
from oases.profile.device import device_name, measure_device
from oases.profile.groups import Probe, contiguous, probes, ranks_per_node
from oases.profile.links import LinkBench, collectives_of, fitted_link, sizes
from oases.simulator.hardware import Hardware, MeasuredBlock, MeasuredOverhead, merge
from oases.simulator.links import LinkModel, Sample
from oases.simulator.program import Contention
from oases.terminal import progress
from oases.train.config import settings

_BUSY = 0.85
"""Of a core: below it, times tell of other programs."""


@dataclass(frozen=True)
class Surroundings:
    """What the ranks themselves cannot see.

    joined: how they are joined, in words. shaped: whether a shaped or simulated link stands between them all.
    alone: one process stands for all ranks. known: a profile of this machine, which gets more blocks; device and
    links are then not measured again.
    """

    joined: str
    shaped: bool = False
    alone: bool = False
    known: Hardware | None = None


def require_same_device(known: Hardware, config: ProfileConfig) -> None:
    """Raise UsageError unless `known` is a profile of what `config` would measure on."""
    name = device_name(config.device)
    if known.device.name != name:
        raise UsageError(
            f"--append: the profile is of the device {known.device.name!r}, and this is {name!r}; leave out "
            "--append, or give another --json"
        )


def run_profile(config: ProfileConfig, around: Surroundings, show_progress: bool) -> Hardware:
    """Measure on the default group; to be called by every rank."""
    require_agreement(settings(config))
    profile = _Profile(config, around)
    visible = show_progress and dist.get_rank() == 0
    with progress("measuring", profile.num_parts, visible) as advance:
        profile.on_part = advance
        return profile.measure()


class _Profile:
    def __init__(self, config: ProfileConfig, around: Surroundings) -> None:
        self._config = config
        self._around = around
        self._world = dist.get_world_size()
        self._per_node = ranks_per_node(self._world, shaped=around.shaped)
        self._degrees = config.tensor_parallel(self._world)
        self._groups = {degree: contiguous(degree) for degree in self._degrees}
        self._probes = [] if around.known else probes(self._per_node)
        self._cuts = [count for count in OVERHEAD_SUB_BATCHES if count <= config.batch]
        self._done = 0
        self._again: set[str] = set()
        """Scopes whose links had to be measured more than once."""
        self.on_part: Callable[..., None] = lambda done, what: None
        """Called after each part with how many are done, and what the last one was."""
        blocks = len(self._degrees) * (len(config.sub_batch_sizes) + len(self._cuts))
        samples = sum(len(collectives_of(probe)) for probe in self._probes) * len(sizes(config))
        self.num_parts = blocks + samples + (0 if around.known else 1 + len(self._scopes))

    @property
    def _scopes(self) -> dict[str, Probe]:
        """The largest groups of each scope."""
        return {probe.scope: probe for probe in sorted(self._probes, key=lambda probe: probe.ranks)}

    def _part(self, what: str) -> None:
        self._done += 1
        self.on_part(self._done, what)

    def measure(self) -> Hardware:
        date = datetime.date.today().isoformat()
        if self._around.known is not None:
            blocks, overheads = self._blocks(self._benches())
            known = self._around.known
            return merge(known, replace(known, blocks=blocks, overheads=overheads, date=date))
        links = self._links()
        device = measure_device(self._config)
        self._part("device")
        benches = self._benches()
        contention = self._contention(benches[max(self._degrees)])
        blocks, overheads = self._blocks(benches)
        models = {scope: replace(link, contention=contention[scope]) for scope, link in links.items()}
        # Of a scope that there is none of, the other one's link stands.
        cluster = models.get("cluster") or models["node"]
        return Hardware(
            f"{self._world} ranks of {device.name}", device, self._per_node, models.get("node", cluster), cluster,
            blocks, self._about(set(models), min(bench.core_share() for bench in benches.values())), date, overheads,
        )  # fmt: skip

    def _benches(self) -> dict[int, BlockBench]:
        return {degree: BlockBench(self._config, group) for degree, group in self._groups.items()}

    def _blocks(
        self, benches: dict[int, BlockBench]
    ) -> tuple[tuple[MeasuredBlock, ...], tuple[MeasuredOverhead, ...]]:
        blocks, overheads = [], []
        for bench in benches.values():
            for samples in self._config.sub_batch_sizes:
                blocks += bench.blocks(samples)
                self._part(f"blocks of tp {bench.tp}, {samples} samples")
            for cut in self._cuts:
                overheads.append(bench.overhead(cut))
                self._part(f"passes of tp {bench.tp}, {cut} sub-batches")
        return tuple(blocks), tuple(overheads)

    def _links(self) -> dict[str, LinkModel]:
        bench, found = LinkBench(self._config), dict[str, LinkModel]()
        for scope in dict.fromkeys(probe.scope for probe in self._probes):
            found[scope] = fitted_link(partial(self._samples, bench, scope), "--batch")
        return found

    def _samples(self, bench: LinkBench, scope: str, attempt: int) -> list[Sample]:
        """Of every group of the scope; measured again, its parts were counted before."""
        if attempt:
            self._again.add(scope)
        found = []
        for probe in self._probes:
            for collective in collectives_of(probe) if probe.scope == scope else ():
                for num_bytes in sizes(self._config, attempt):
                    found.append(bench.sample(probe, collective, num_bytes, attempt))
                    if not attempt:
                        self._part(f"{collective} of {probe.ranks} ranks, {num_bytes / 1e3:.0f} kB")
        return found

    def _contention(self, bench: BlockBench) -> dict[str, Contention]:
        found = {}
        for scope, probe in self._scopes.items():
            assert probe.mine is not None, "the largest groups of a scope hold every rank"
            found[scope] = ContentionBench(bench, probe.mine).measure()
            self._part("contention")
        return found

    def _about(self, scopes: set[str], core_share: float) -> str:
        parts = [f"Measured by oases profile, {self._world} ranks {self._around.joined}."]
        if self._around.alone:
            parts.append("One process stood for all ranks, so blocks ran without others beside them.")
        if scopes == {"cluster"} and self._per_node == 1:
            parts.append("The link counts as one between nodes of one rank each.")
        if scopes == {"node"}:
            parts.append("There was one node; the link between nodes was not measured and is taken for the node's.")
        if dist.get_backend() == "sim":
            parts.append("Messages between two ranks were not measured: a simulated link has none.")
        if self._again:
            parts.append(
                "At first the times of the links did not grow with their bytes, as on a busy machine; they are the "
                "least of more repetitions, not medians."
            )
        if core_share < _BUSY:
            parts.append(
                f"Other programs were running: a rank had {100 * core_share:.0f} % of its core, so times are too "
                "long and slowdowns unsure; measure again on a quiet machine."
            )
        return " ".join(parts)
