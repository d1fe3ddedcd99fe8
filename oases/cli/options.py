"""Shared parts of commands: options from dataclasses, ranks and links, JSON output, error messages."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from oases import testbed
from oases.errors import UsageError, make_folder
from oases.files import write_text
from oases.launch import fork_server
from oases.limits import flag_of, require_numbers, short
from oases.moved import REMOVED
from oases.testbed import Backend

STANDARD_OUTPUT = "-"
"""Path that stands for standard output."""

ELSEWHERE = {
    "--graph": "--model",
    "--lr": "--learning-rate",
    "--bf16": "--precision bfloat16",
    "--clip-grad": "--clip",
    "--max-grad-norm": "--clip",
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--num-layers": "--layers",
    "--hidden-size": "--hidden",
    "--num-attention-heads": "--heads",
    "--seq-length": "--sequence",
    "--global-batch-size": "--batch",
    "--gradient-accumulation-steps": "--micro-batches",
    "--train-iters": "--steps",
    "--max-steps": "--steps",
    "--save": "--checkpoint",
    "--output-dir": "--checkpoint",
    "--save-interval": "--checkpoint-every",
    "--load": "--resume",
    "--num-experts": "--experts",
    "--use-distributed-optimizer": "--zero",
    "--gradient-checkpointing": "--recompute full",
    "--recompute-activations": "--recompute full",
}
"""Options of oases 0.1, of Megatron and of transformers, and ours."""


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors like all others: one line, exit code 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, _whole)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; report unknown arguments as errors of the command that got them, with the nearest known option."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if gone := REMOVED.get(name.removeprefix("--").replace("-", "_")):
                self.error(f"{name} is no option any more: {gone}")
            known = ELSEWHERE.get(name, "")
            near = [known] if known.split(" ")[0] in self._option_string_actions else []
            near = near or difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.7)
            meant = f" (did you mean {near[0]}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        require_numbers(vars(options), flags=True)
        for option, value in vars(options).items():
            if isinstance(value, str) and value and not value.replace(",", "").strip():
                self.error(f"{flag_of(option)} names nothing: {value!r}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Report a parsing error (called by argparse)."""
        fail(f"{message}; see '{self.prog} --help'")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {short(text)}") from error


def fail(message: str) -> NoReturn:
    """Print an error, on rank 0 only, and exit with code 2."""
    if is_first_rank():
        print(f"oases: error: {message}", file=sys.stderr)
    sys.exit(2)


def is_first_rank() -> bool:
    """Whether this process prints and writes: under torchrun every rank runs the command."""
    return os.environ.get("RANK", "0") == "0"


class Command(NamedTuple):
    """A command's module, which has `add(commands)`, and its help."""

    module: str
    help: str


COMMANDS = {
    "demo": Command(
        "oases_train.command", "train a GPT over a slow link with synchronous and overlapped collectives, and compare"
    ),
    "train": Command(
        "oases_train.command", "train a GPT on text with data, pipeline and tensor parallelism, or by a plan"
    ),
    "export": Command("oases_train.command", "export the weights of a checkpoint to one safetensors file"),
    "check": Command(
        "oases_check.command", "train a sharded model beside one process, and name what differs: gradients, norms"
    ),
    "bench": Command("oases.cli.bench", "run a benchmark on this machine"),
    "profile": Command(
        "oases.cli.profile", "measure blocks, links and contention of this machine, for plan and simulate"
    ),
    "plan": Command(
        "oases.cli.plan", "find the fastest plan that fits in memory: degrees, schedules, recomputation; no GPU"
    ),
    "simulate": Command(
        "oases.cli.simulate", "predict a training step on a cluster of any size without running it; no GPU"
    ),
}
"""Commands in the order of the help."""


def command(commands: Any, name: str, description: str | None = None) -> argparse.ArgumentParser:
    """Add a command, with --json, to subparsers. description: None for one of COMMANDS."""
    description = COMMANDS[name].help if description is None else description
    parser: argparse.ArgumentParser = commands.add_parser(name, help=description, description=description + ".")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - = to standard output")
    return parser


_METAVARS = {int: "N", float: "X"}


def add_options(
    parser: argparse.ArgumentParser, defaults: Any, skip: Sequence[str] = (), *, only_given: bool = False
) -> None:
    """Add an option per field of a configuration dataclass, with its help, default, choices and type.

    only_given: options not given are absent from the namespace.
    """
    for item in dataclasses.fields(defaults):
        if item.name in skip:
            continue
        # Defaults that depend on other options are described in the help.
        follows = item.name in ("heads", "sub_batches") or (item.name == "degrees" and not item.default)
        default = item.default if follows else getattr(defaults, item.name)
        kind = str if default is None else type(default)
        if kind is bool:
            parser.add_argument(
                flag_of(item.name), action="store_true", help=item.metadata["help"],
                default=argparse.SUPPRESS if only_given else default,
            )  # fmt: skip
            continue
        shown = "" if default is None or follows else f" (default: {default})"
        choices = item.metadata.get("choices") or None
        parser.add_argument(
            flag_of(item.name), type=kind, default=argparse.SUPPRESS if only_given else default,
            choices=choices, metavar=None if choices else item.metadata.get("metavar") or _METAVARS.get(kind, "TEXT"),
            help=item.metadata["help"] + shown,
        )  # fmt: skip


def add_ranks(
    parser: argparse.ArgumentParser, link: str | None, tp: int | None = 2, *, backend: str = "gloo"
) -> None:
    """Add the options of commands that start ranks. backend: default, "auto" for commands that resolve it."""
    parser.add_argument(
        "--tp", "--tensor-parallel", type=int, default=tp, metavar="N", help="tensor-parallel ranks (default: 2)"
    )
    parser.add_argument(
        "--link", default=link, metavar="RATE",
        help="bandwidth of an emulated link between ranks, e.g. 500mbit, 1gbit; needs Linux, no root "
        f"(default: {link or 'no emulation'})",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N",
        help="emulate N nodes on this machine, with --link between them and fast links within (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default=backend, metavar="NAME",
        help="gloo; staged, through memory that ranks of one machine share; nccl; or sim:alpha=TIME,bandwidth=RATE "
        "for a simulated link; with ,single_process appended, and always on a GPU, one process represents all ranks"
        + "; auto: staged for ranks on the CPU of one machine without --link, else gloo" * (backend == "auto")
        + f" (default: {backend})",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="X",
        help="timeout of a collective, after which the run is aborted, seconds (default: 300)",
    )  # fmt: skip


def values(cls: type[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Options that are fields of a configuration dataclass, by name."""
    names = {item.name for item in dataclasses.fields(cls)}
    return {name: value for name, value in vars(options).items() if name in names}


def is_given(options: argparse.Namespace, name: str) -> bool:
    """Whether an option without a default, or a flag, was given; 0 is a value."""
    value = getattr(options, name)
    return value is not None and value is not False


def config_from(cls: type[Any], options: argparse.Namespace, **fixed: Any) -> Any:
    """Build a configuration from the options of the same names."""
    return cls(**values(cls, options) | fixed)


def enter_link(
    options: argparse.Namespace, given: Sequence[str], *, or_simulate: bool = False, ranks: int | None = None,
    script: str | None = None,
) -> str:  # fmt: skip
    """Restart this process behind the emulated link of --link, if needed; returns a description of the link.

    ranks: their number, default --tp. script: path of the script run with the arguments `given`; None: the command
    `oases`.
    """
    rate, nodes = options.link, options.nodes
    if nodes != 1:
        _check_nodes(options, options.tp if ranks is None else ranks)
    if rate is None:
        return f"over {options.backend}"
    testbed.link_bytes_per_second(rate)
    if options.backend == "staged" and nodes == 1:
        raise UsageError(f"--link {rate} slows sockets, and --backend staged uses none; leave out one of the two")
    if testbed.inside(rate, nodes):
        return f"over a link of {testbed.with_nodes(rate, nodes)}"
    asked = f"--link {rate}" + (f" --nodes {nodes}" if nodes != 1 else "")
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            f"{asked} cannot shape the link between ranks that a launcher has started; leave out "
            "torchrun, so that oases starts the ranks, or leave out --link"
        )
    reason = testbed.why_impossible(rate, nodes)
    if reason is None:
        if options.json == STANDARD_OUTPUT:
            os.dup2(sys.stdout.fileno(), 1)  # the process that replaces this one parts them again
        testbed.relaunch(rate, given, nodes, script)
    if not or_simulate or nodes != 1:  # the simulated link has no nodes
        raise UsageError(f"{asked} is not available: {reason}; or leave out {asked.replace(f' {rate}', '')}")
    print(f"oases: no shaped link here: {reason}. Continuing with a simulated link.", file=sys.stderr)
    options.backend = f"sim:alpha=50us,bandwidth={rate}"
    return f"over a simulated link of {rate}"


def _check_nodes(options: argparse.Namespace, ranks: int) -> None:
    nodes = options.nodes
    testbed.Nodes(nodes, options.link or "").ranks_per_node(ranks)
    if options.link is None:
        raise UsageError(f"--nodes {nodes} joins nodes by links of a rate; give it with --link, e.g. --link 500mbit")
    if options.backend not in ("gloo", "staged"):
        raise UsageError(
            f"--nodes {nodes} joins ranks by gloo or staged, got --backend {options.backend}; leave out either one"
        )


def resolve_backend(options: argparse.Namespace, device: str, ranks: int, resumed: str | None) -> None:
    """Replace `--backend auto` by a name.

    resumed: backend of the run that this one continues, None for a new run: their sums must be the same to the bit.
    """
    if options.backend != "auto":
        return
    here = "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    shares = here and ranks > 1 and device == "cpu" and sys.platform == "linux"
    shares = shares and options.link is None and options.nodes == 1
    options.backend = "staged" if shares and resumed in (None, "staged") else "gloo"


def prepare_ranks(options: argparse.Namespace, *modules: str) -> None:
    """Start the fork server, which imports the ranks' modules in parallel with this process."""
    replaced = options.link is not None and not testbed.inside(options.link, options.nodes)
    if not replaced and "WORLD_SIZE" not in os.environ:
        fork_server.start(modules)


def make_rank_options(options: argparse.Namespace, device: str, ranks: int | None = None) -> Any:
    """Build the options of ranks, --tp many by default, from those of `add_ranks`."""
    from oases.launch.ranks import RankOptions

    if not 0 < options.timeout <= 1e6:
        raise UsageError(f"--timeout must be above 0 and at most 1e6 seconds, got {options.timeout}")
    backend = Backend.parse(options.backend)
    if backend.name == "nccl" and device != "cuda":
        raise UsageError(f"backend nccl needs --device cuda, got --device {device}; use gloo on the CPU")
    if backend.name in ("nccl", "staged"):
        backend = dataclasses.replace(backend, cuda=device == "cuda")
    if backend.name == "sim" and device == "cuda" and "WORLD_SIZE" not in os.environ:
        backend = dataclasses.replace(backend, single_process=True)  # several ranks on one GPU would compete for it
    nodes = None if options.nodes == 1 else testbed.Nodes(options.nodes, options.link)
    return RankOptions(options.tp if ranks is None else ranks, backend, options.timeout, nodes)


def require_writable(name: str, path: str | None) -> None:
    """Create a file's folder if missing. UsageError, before any work is done, unless the file can be written."""
    if path is None or (path == STANDARD_OUTPUT and name == "--json"):
        return
    target = Path(path)
    if not path or target.is_dir():
        raise UsageError(f"{name} {path!r} is a folder; give the path of a file")
    if target.is_fifo() or target.is_socket() or target.is_block_device():
        raise UsageError(f"{name} {path!r} is a pipe, socket or disk; give the path of a file")
    make_folder(target.resolve().parent, name)
    if not os.access(target if target.exists() else target.resolve().parent, os.W_OK):
        raise UsageError(f"{name} {path!r} cannot be written: permission denied")


@contextmanager
def result_output(path: str | None) -> Iterator[None]:
    """Context of a command with --json PATH: if that is "-", all but the result goes to standard error.

    So do other processes that are started in it, such as ranks.
    """
    if path != STANDARD_OUTPUT:
        yield
        return
    from oases.terminal import console

    before = sys.stdout
    before.flush()
    with open(os.dup(1), "w", encoding="utf-8") as sys.stdout:
        os.dup2(2, 1)
        console.stderr = True
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(sys.stdout.fileno(), 1)
            sys.stdout, console.stderr = before, False


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write a command's result as JSON, if a path was given."""
    if path is not None:
        write_result(path, json.dumps(_plain(result), indent=2, allow_nan=False) + "\n")


def write_result(path: str, text: str) -> None:
    """Write the text of --json to its file, or to standard output."""
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(path, text, "--json")


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
