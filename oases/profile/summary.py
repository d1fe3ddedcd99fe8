"""A profile in words and tables, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from oases.plans.shape import ModelShape
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Hardware, MeasuredBlock
from oases.simulator.links import LinkModel


def summary(hardware: Hardware) -> Iterator[str | Table]:
    """What to print, piece by piece."""
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
        links = {"the only one": hardware.cluster}
    for name, link in links.items():
        table.add_row(
            name, f"{1e6 * link.startup_seconds:.0f} us", f"{link.bytes_per_second / 1e6:.0f} MB/s",
            f"{100 * link.fit_error():.0f} %" if link.samples else "-", str(len(link.samples)),
            f"{link.contention.compute:.2f} x", f"{link.contention.link:.2f} x",
        )  # fmt: skip
    table.caption = "fit error: median of start-up and bandwidth alone against the samples"
    return table


def _blocks_tables(hardware: Hardware) -> Iterator[Table]:
    """One per shape and degree."""
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
                rate = f"{_flops(block) / 1e9:.0f}"
                table.add_row(block.kind, f"{block.samples:g}", *_milliseconds(block.times), rate, halves)
        if shape == shapes[-1]:
            table.caption = (
                "F forward, C combine, R recomputed without and with its last product, BC backward of C, B rest of "
                "the backward pass, W weight gradients\nGFLOP/s: products of forward and backward pass; halves: time "
                "of two sub-batches of half the samples over that of the whole"
            )
        yield table


def _milliseconds(t: BlockTimes) -> Iterator[str]:
    for seconds in (
        t.forward, t.combine, t.recompute, t.recompute_whole, t.combine_backward, t.backward, t.weight_gradient,
    ):  # fmt: skip
        yield f"{1e3 * seconds:.2f}"


def _overheads_table(hardware: Hardware) -> Table:
    table = _table(
        "passes outside their ops, milliseconds", ("shape",), "layers", "sub-batches", "forward", "backward"
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
    """Per second, of the products: the backward pass has twice as many as the forward pass."""
    shape = ModelShape(block.hidden, 1, block.heads, block.sequence, dtype=block.dtype)
    return 3 * sum(shape.product_flops(block.kind, block.tp, block.samples)) / _step(block.times)
