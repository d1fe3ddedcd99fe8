"""Options of plan and simulate: model, cluster, batch size and memory."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from oases.core.dtypes import LOSSY, WIRES
from oases.errors import UsageError
from oases.plans.gpt import MODELS, gpt, model_called, resized
from oases.plans.layered import Model
from oases.plans.shape import ELEMENT_BYTES
from oases.simulator.cluster import ONE_NODE, cluster_called, known_clusters, with_link
from oases.simulator.hardware import Hardware
from oases.simulator.hardware_file import read_hardware

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES = ("hidden", "layers", "heads")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model options."""
    known = ", ".join(MODELS)
    parser.add_argument(
        "--model", metavar="NAME|PATH",
        help=f"model: a config.json of transformers, or a folder with one, whose layers are traced; {known}; or give "
        "its sizes",
    )  # fmt: skip
    for name, text in {
        "hidden": "hidden size, features", "layers": "transformer layers",
        "heads": "attention heads (default: hidden / 64)",
        "sequence": "sequence length, tokens per sample", "vocabulary": "vocabulary size (default: 50304)",
    }.items():  # fmt: skip
        more = " (default: the model's)" if name == "sequence" else ""
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text + more)
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_BYTES), help="dtype of weights and activations (default: float32)"
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the cluster options."""
    parser.add_argument(
        "--cluster", metavar="[NODESx]COUNTxNAME",
        help=f"cluster, such as 64x3090, of which up to {ONE_NODE} devices are one node, or 2x8x3090, 2 nodes of 8; "
        f"names: {', '.join(known_clusters())}",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="FILE",
        help="hardware profile of oases profile, in place of --cluster",
    )  # fmt: skip
    parser.add_argument(
        "--world", "--gpus", type=int, metavar="N", help="number of devices, with --profile or --cluster NAME"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N",
        help="devices per node (default: the profile's, or the cluster's)",
    )  # fmt: skip
    parser.add_argument(
        "--link", metavar="RATE",
        help="bandwidth between nodes, of a single node inside it: 25gbit, 20GB/s, or node=20GB/s,cluster=25gbit "
        "(default: the profile's)",
    )  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add batch size, memory limit and search space."""
    parser.add_argument("--global-batch", type=int, metavar="N", help="global batch size, samples per optimizer step")
    parser.add_argument(
        "--memory", type=_parsed(parse_bytes), metavar="SIZE",
        help="memory limit per device, e.g. 24GiB, 20GB, 900MiB (default: 96 %% of the device's, less 1 GiB for its "
        "runtime)",
    )  # fmt: skip
    parser.add_argument(
        "--degrees", type=_parsed(counts), metavar="N,N",
        help="tensor-parallel degrees to search (default: powers of two, or those that the profile has of the model)",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batches", type=_parsed(counts), metavar="N,N", help="numbers of micro-batches to search"
    )
    parser.add_argument("--pipelines", type=_parsed(names), metavar="NAME,NAME", help="pipeline schedules to search")
    parser.add_argument("--no-recompute", action="store_true", help="exclude activation recomputation")
    parser.add_argument(
        "--no-zero", action="store_true", help="exclude ZeRO-2 (sharded gradients and optimizer state)"
    )
    parser.add_argument("--no-fsdp", action="store_true", help="exclude FSDP (sharded weights)")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="exclude sequence parallelism")
    parser.add_argument(
        "--wire", type=_parsed(names), metavar="NAME,NAME",
        help=f"dtypes of tensor-parallel sums to search: {', '.join(WIRES)} (default: none, the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--expert-parallel", type=_parsed(partial(counts, least=0)), metavar="N,N",
        help="ranks to divide a traced model's experts over, and to send tokens to; 0 = the tensor-parallel ranks, "
        "whose results are summed (default: 0 and powers of two)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-lossy", action="store_true",
        help=f"also search sums sent with rounding errors: {', '.join(LOSSY)}; --wire names others",
    )  # fmt: skip


def model_of(options: argparse.Namespace) -> Model:
    """Model of the options; traced if it is a path. UsageError for an unknown or incomplete one."""
    given = {name: getattr(options, name) for name in (*_SIZES, "sequence", "vocabulary", "dtype")}
    given = {name: value for name, value in given.items() if value is not None}
    if options.model is not None:
        both = [f"--{name}" for name in _SIZES if name in given]
        if both:
            raise UsageError(f"--model {options.model} has its sizes; leave out {', '.join(both)}, or --model")
        if options.model not in MODELS and (Path(options.model).exists() or {"/", "."} & set(options.model)):
            return _traced(options)
        return resized(model_called(options.model), **given)
    if "hidden" in given and "heads" not in given:
        given["heads"] = max(1, given["hidden"] // 64)
        if given["hidden"] % given["heads"]:
            raise UsageError(f"--hidden {given['hidden']} is not a multiple of 64 features per head; give --heads")
    missing = [f"--{name}" for name in (*_SIZES, "sequence") if name not in given]
    if missing:
        raise UsageError(
            f"which model? {', '.join(missing)} is missing; give it, or --model with one of {', '.join(MODELS)}"
        )
    return gpt(**given)


def _traced(options: argparse.Namespace) -> Model:
    """Model of a configuration, with progress by kind of layer."""
    from oases.autotp.costs import trace_configuration
    from oases.terminal import working

    if options.vocabulary is not None:
        raise UsageError(f"--model {options.model} has its vocabulary; leave out --vocabulary {options.vocabulary}")
    if options.sequence is not None:
        require_count("--sequence", options.sequence)
    with working(f"tracing {options.model}, kind of layer") as update:
        return trace_configuration(
            options.model, sequence=options.sequence, dtype=options.dtype or "float32", on_layer=update
        )


def cluster_of(options: argparse.Namespace, world: int | None = None) -> tuple[Hardware, int]:
    """Hardware of the options and its number of devices. world: default number."""
    if (options.cluster is None) == (options.profile is None):
        what = "both are given" if options.cluster else "neither is given"
        raise UsageError(f"which cluster? Give --cluster, such as 64x3090, or --profile FILE with --world N; {what}")
    per_node = options.ranks_per_node
    if per_node is not None:
        require_count("--ranks-per-node", per_node)
    if options.cluster is not None:
        name, counted = options.cluster, re.match(r"\d+x", options.cluster) is not None
        if options.world is not None:
            if counted:
                raise UsageError(
                    f"--cluster {name} sets the number of devices; leave out --world {options.world}, or give "
                    f"--cluster {name.partition('x')[2]}"
                )
            name = f"{require_count('--world', options.world)}x{name}"
        hardware, world = cluster_called(name, per_node)
        return (hardware if options.link is None else with_link(hardware, world, options.link)), world
    hardware = read_hardware(Path(options.profile))
    world = options.world if options.world is not None else world
    if world is None:
        raise UsageError(f"--profile {options.profile} does not give the number of devices; give --world N")
    if options.ranks_per_node is not None:
        hardware = replace(hardware, ranks_per_node=options.ranks_per_node)
    require_count("--world", world)
    per_node = hardware.ranks_per_node
    if world > per_node and world % per_node:
        raise UsageError(
            f"--world {world} devices do not fill nodes of {per_node}; give {world - world % per_node} or "
            f"{world - world % per_node + per_node}, or another --ranks-per-node"
        )
    return (hardware if options.link is None else with_link(hardware, world, options.link)), world


def batch_of(options: argparse.Namespace) -> int:
    """Global batch size. UsageError if missing or out of range."""
    if options.global_batch is None:
        raise UsageError("how many samples make one optimizer step? Give --global-batch N")
    return require_count("--global-batch", options.global_batch)


def require_count(name: str, value: int) -> int:
    """Return a value of at least 1; else UsageError."""
    if value < 1:
        raise UsageError(f"{name} must be at least 1, got {value}")
    return value


def parse_bytes(text: str) -> int:
    """Parse a size with its unit, such as 24GiB, into bytes. UsageError for an invalid one."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is not a size with a unit, such as 24GiB, 20GB or 900MiB")
    found = round(float(match[1]) * unit)
    if found < 2**20:
        raise UsageError(f"{text!r} is below 1 MiB, too small for any model; give e.g. 24GiB")
    return found


def counts(text: str, least: int = 1) -> tuple[int, ...]:
    """Parse comma-separated integers of at least `least`; sorted, without duplicates."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part[:9]) >= least and len(part) < 9 for part in parts):
        kind = "positive integers" if least else "integers of at least 0"
        raise UsageError(f"{text!r} is not a list of {kind}, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def names(text: str) -> tuple[str, ...]:
    """Parse comma-separated names, without duplicates."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _parsed(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Convert UsageError to argparse's error, which names the option."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
