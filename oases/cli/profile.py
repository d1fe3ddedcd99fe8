"""Command `profile`: measure this machine for the planner and the simulator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from oases.cli.options import (
    STANDARD_OUTPUT,
    add_options,
    add_ranks,
    command,
    config_from,
    enter_link,
    is_first_rank,
    make_rank_options,
    write_result,
)
from oases.errors import UsageError
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Hardware, MeasuredBlock
from oases.simulator.hardware_file import read_hardware, to_json
from oases.simulator.links import LinkModel


def summary(hardware: Hardware) -> Iterator[str | Table]:
    """Printable parts of a profile: device, links, blocks, overheads."""
    device = hardware.device
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {dtype}" for dtype, rate in device.flops_per_second.items())
    yield (
        f"{hardware.name}; {hardware.ranks_per_node} a node\n{hardware.about}\ndevice: {rates}, copies "
        f"{device.bytes_per_second / 1e9:.1f} GB/s, memory {device.memory_bytes / 1e9:.1f} GB a rank, a small op "
        f"{1e6 * device.launch_seconds:.1f} us"
    )
    yield _links_table(hardware)
    yield from _blocks_tables(hardware)
    if hardware.overheads:
        yield _overheads_table(hardware)


def _links_table(hardware: Hardware) -> Table:
    table = _table(
        "links", ("link",), "start-up", "bandwidth", "fit error", "samples", "compute slowed", "link slowed"
    )
    links: dict[str, LinkModel] = {"inside a node": hardware.node, "between nodes": hardware.cluster}
    if hardware.node == hardware.cluster:
        links = {"all ranks": hardware.cluster}
    for name, link in links.items():
        table.add_row(
            name, f"{1e6 * link.startup_seconds:.0f} us", f"{link.bytes_per_second / 1e6:.0f} MB/s",
            f"{100 * link.fit_error():.0f} %" if link.samples else "-", str(len(link.samples)),
            f"{link.contention.compute:.2f} x", f"{link.contention.link:.2f} x",
        )  # fmt: skip
    table.caption = "fit error: median error of start-up + bytes / bandwidth against the samples"
    return table


def _blocks_tables(hardware: Hardware) -> Iterator[Table]:
    """Tables of block times, one per shape and degree."""
    by_key = {block.key: block for block in hardware.blocks}
    shapes = sorted({block.key[1:6] for block in hardware.blocks})
    for shape in shapes:
        hidden, heads, sequence, dtype, tp = shape
        table = _table(
            f"hidden {hidden}, {heads} heads, sequence {sequence}, {dtype}, tp {tp}: milliseconds of each op",
            ("block",), "samples", "F", "C", "R", "R whole", "BC", "B", "W", "GFLOP/s", "halves",
        )  # fmt: skip
        for block in sorted(hardware.blocks, key=lambda block: (block.kind, block.samples)):
            if block.key[1:6] == shape:
                half = by_key.get((*block.key[:-1], block.samples / 2))
                halves = "-" if half is None else f"{2 * _step(half.times) / _step(block.times):.2f}"
                rate = f"{_flops(block) / 1e9:.0f}" if block.of_gpt else "-"
                table.add_row(
                    block.kind.partition(",")[0], f"{block.samples:g}", *_milliseconds(block.times), rate, halves
                )
        if shape == shapes[-1]:
            table.caption = (
                "F forward, C combine, R recompute without and with its last matmul, BC backward of C, B rest of the "
                "backward pass, W weight gradients\nGFLOP/s: matmuls of forward and backward pass; halves: time of "
                "two sub-batches of half the samples over that of the whole"
            )
        yield table


def _milliseconds(t: BlockTimes) -> Iterator[str]:
    for seconds in (
        t.forward, t.combine, t.recompute, t.recompute_whole, t.combine_backward, t.backward, t.weight_gradient,
    ):  # fmt: skip
        yield f"{1e3 * seconds:.2f}"


def _overheads_table(hardware: Hardware) -> Table:
    table = _table(
        "overhead of passes outside their ops, milliseconds",
        ("shape",),
        "layers",
        "sub-batches",
        "forward",
        "backward",
    )
    for each in hardware.overheads:
        table.add_row(
            f"{each.hidden} x {each.sequence}, tp {each.tp}, {each.samples:g} samples", str(each.layers),
            str(each.sub_batches), f"{1e3 * each.forward:.2f}", f"{1e3 * each.backward:.2f}",
        )  # fmt: skip
    return table


def _table(title: str, names: tuple[str, ...], *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _step(times: BlockTimes) -> float:
    """Seconds of a block's forward and backward pass."""
    return times.forward + times.combine + times.combine_backward + times.backward + times.weight_gradient


def _flops(block: MeasuredBlock) -> float:
    """FLOP/s of the matmuls; the backward pass has twice those of the forward pass."""
    model, kind = block.of
    return 3 * sum(model.matmul_flops(kind, block.tp, block.samples)) / _step(block.times)


def add(commands: Any) -> None:
    """Add the command."""
    from oases.profile.config import ProfileConfig

    profile = command(commands, "profile")
    add_options(profile, ProfileConfig(), skip=("sub_batches", "recompute"))
    add_ranks(profile, link=None)
    profile.add_argument("--name", metavar="TEXT", help="name of the hardware in the profile")
    profile.add_argument(
        "--append", action="store_true", help="add block times of another shape to the profile in --json"
    )
    profile.set_defaults(run=_profile)


def _profile(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.terminal import console

    if options.json is None and options.append:
        raise UsageError("--append needs --json FILE for the profile")
    hardware = _measured(options, given)
    if not is_first_rank():
        return
    if options.name:
        hardware = replace(hardware, name=options.name)
    for part in summary(hardware):
        console.print(part, soft_wrap=isinstance(part, str))
    if options.json is None:
        console.print("Nothing was written; give --json FILE to keep the profile.")
        return
    write_result(options.json, to_json(hardware))
    if options.json != STANDARD_OUTPUT:
        console.print(f"written to {options.json}", soft_wrap=True)


def _flags(given: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in given if word.startswith("--")}


def _measured(options: argparse.Namespace, given: Sequence[str]) -> Hardware:
    from oases.launch.ranks import run_ranks
    from oases.profile.config import ProfileConfig
    from oases.profile.run import Surroundings, of_model, require_same_device, run_profile
    from oases.terminal import console

    config = config_from(ProfileConfig, options)
    if config.model is not None:  # before ranks measure anything
        config = of_model(config)
        if own := sorted(_flags(given) & {"--hidden", "--heads"}):
            raise UsageError(f"--model {config.model} has its sizes; leave out {', '.join(own)}, or --model")
    config.check(options.tp)
    known = None
    if options.append and Path(options.json).is_file():
        known = read_hardware(options.json)
        require_same_device(known, config)
    joined = enter_link(options, given)
    ranks = make_rank_options(options, config.device)
    shaped = options.link is not None or ranks.backend.name == "sim"
    around = Surroundings(joined, shaped, ranks.backend.single_process, known)
    console.print(
        f"{options.tp} ranks {joined}; blocks of tp {', '.join(map(str, config.tensor_parallel(options.tp)))}"
    )
    try:
        hardware: Hardware = run_ranks(run_profile, (config, around, True), ranks)
    except KeyboardInterrupt:  # without a launcher, in a single process
        print("oases: interrupted", file=sys.stderr)
        _nothing_written(options)
        sys.exit(130)
    except SystemExit as exit:
        if exit.code != 2:  # 2 is a mistake in what was given, whose message says enough
            _nothing_written(options)
        raise
    return hardware


def _nothing_written(options: argparse.Namespace) -> None:
    if options.json is not None and is_first_rank():
        print(f"oases: nothing was written to {options.json}", file=sys.stderr)
