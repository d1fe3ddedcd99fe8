"""Check what nvcc makes of csrc/*.cu, without a GPU: `make cuda-check`.

    python -m build_tools.cuda_check     compile for every architecture; print registers, spills and accesses

The exit code is 1 where a kernel spills registers to memory, or where one that moves 16 bytes at a time uses more
registers, or more accesses of less than 16 bytes, than `WIDE` says.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from build_tools.cuda_build import kernel_units
from build_tools.objects import CompileError, compile_units
from build_tools.toolkit import NoCudaError, ask, find_toolkit


@dataclass(frozen=True)
class Limit:
    """Limits of a kernel that moves 16 bytes at a time, on every architecture.

    registers: per thread. stores, loads: instructions of less than 16 bytes to and from global memory, for numbers of
    which a row or a token has one; a pack of 16 bytes that is split makes at least two more.
    stores_packs: whether it also stores 16 bytes at a time.
    """

    registers: int
    stores: int = 0
    loads: int = 0
    stores_packs: bool = True


WIDE = {
    # Mean and 1 / standard deviation of a row.
    "forward_kernel": Limit(registers=96, stores=2),
    # The same, loaded; partial sums of three gradients, where the row's length is not that of its packs.
    "backward_kernel": Limit(registers=128, stores=6, loads=2),
    "gelu_kernel": Limit(registers=64),
    # Partial sums of the bias's gradient, in float32, of 8 columns.
    "gelu_backward_kernel": Limit(registers=64, stores=8),
    "swiglu_kernel": Limit(registers=64),
    "swiglu_backward_kernel": Limit(registers=64),
    # Row and weight of a slot, seven slots at a time by unrolling, with weights and without.
    "combine": Limit(registers=80, loads=21),
    # Row and weight of a slot; the weight's gradient, by one lane or, where there are no rows, by another path.
    "combine_backward": Limit(registers=64, stores=2, loads=3),
    # The slot of a row.
    "gather": Limit(registers=48, loads=1),
    # A bit per number.
    "pack": Limit(registers=48, stores=1, stores_packs=False),
}
"""Kernels that move 16 bytes at a time. Registers: backward_kernel and forward_kernel leave room for 2 blocks of 256
threads on a multiprocessor, combine for 3, gather and pack for 5, the others for 4. Accesses: what nvcc 13.0 makes.
"""
_NAMES = "|".join(f"{len(name)}{name}" for name in WIDE)
_MANGLED = re.compile(rf"(?:{_NAMES})I(?:(?:6__half|13__nv_bfloat16)(?:S[0-9]_|f)?Li8E|ff?Li4E|5uint4)")
"""Instances of 16 bytes at a time, by the template's arguments: 8 numbers of 16 bits, 4 of 32, or a uint4."""


def wide_kernel(symbol: str) -> str | None:
    """The name in `WIDE` of a mangled symbol; None for what moves less than 16 bytes at a time."""
    match = _MANGLED.search(symbol)
    return match and re.sub(r"^[0-9]+|I.*$", "", match[0])


@dataclass
class Usage:
    """Resources of one kernel: registers per thread; stack and spills in bytes per thread."""

    registers: int = 0
    stack: int = 0
    spills: int = 0


def usage(log: str) -> dict[str, dict[str, Usage]]:
    """Resource usage printed by ptxas -v: by architecture ("sm_90") and kernel."""
    found: dict[str, dict[str, Usage]] = {}
    current = Usage()
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(.*)' for '(sm_\w+)'", line):
            current = found.setdefault(match[2], {}).setdefault(match[1], Usage())
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.stack, current.spills = int(match[1]), int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            current.registers = int(match[1])
    return found


def usage_faults(found: dict[str, dict[str, Usage]]) -> list[str]:
    """Kernels that spill, and wide ones that use more registers than their limit."""
    faults = []
    for architecture, kernels in found.items():
        for symbol, used in kernels.items():
            if used.spills:
                faults.append(f"{symbol} on {architecture} spills {used.spills} bytes of registers to memory")
            name = wide_kernel(symbol)
            if name is not None and used.registers > (most := WIDE[name].registers):
                faults.append(
                    f"{symbol} on {architecture} uses {used.registers} registers, at most {most} are allowed"
                )
    return faults


@dataclass
class Accesses:
    """Instructions of one wide kernel that access global memory, by whether they move 16 bytes or more."""

    wide_loads: int = 0
    wide_stores: int = 0
    loads: int = 0
    stores: int = 0


def accesses(sass: str) -> dict[tuple[str, str], Accesses]:
    """Those of every wide kernel, by architecture and symbol, in the output of cuobjdump -sass.

    Without accesses to memory of either kind (LD, ST), as to partial sums that are in shared memory where they fit.
    """
    architecture, found = "", {}
    for part in re.split(r"^\s*(?=Function : |arch = )", sass, flags=re.MULTILINE):
        if match := re.match(r"arch = (\w+)", part):
            architecture = match[1]
        match = re.match(r"Function : (\S+)", part)
        if match is None or wide_kernel(match[1]) is None:
            continue
        counts = found[architecture, match[1]] = Accesses()
        for kind, suffixes in re.findall(r"\b(LD|ST)G\.E((?:\.\w+)*)", part):
            wide = bool({"128", "256"} & set(suffixes.split(".")))
            name = ("wide_" if wide else "") + ("loads" if kind == "LD" else "stores")
            setattr(counts, name, getattr(counts, name) + 1)
    return found


def access_faults(found: dict[tuple[str, str], Accesses], architectures: Iterable[str]) -> list[str]:
    """Wide kernels that split packs of 16 bytes, and architectures on which one of `WIDE` was not found at all."""
    faults = []
    for (architecture, symbol), counts in found.items():
        limit = WIDE[wide_kernel(symbol) or ""]
        where = f"{symbol} on {architecture}"
        if not counts.wide_loads or (limit.stores_packs and not counts.wide_stores):
            faults.append(f"{where} has no {'store' if counts.wide_loads else 'load'} of 16 bytes")
        for what, narrow, most in (("stores", counts.stores, limit.stores), ("loads", counts.loads, limit.loads)):
            if narrow > most:
                faults.append(f"{where} has {narrow} {what} of less than 16 bytes, at most {most} are allowed")
    for architecture in architectures:
        seen = {wide_kernel(symbol) for on, symbol in found if on == architecture}
        faults += [f"no kernel {name} of 16 bytes at a time on {architecture}" for name in WIDE if name not in seen]
    return faults


def find_cuobjdump(nvcc: str) -> str:
    """The program that shows machine code: $CUOBJDUMP, beside nvcc, on PATH, or in a wheel: its own, or triton's.

    Raises NoCudaError.
    """
    places = [os.environ.get("CUOBJDUMP"), Path(nvcc).with_name("cuobjdump"), "cuobjdump"]
    for package, inside in (("nvidia", "cu*/bin/cuobjdump"), ("triton", "backends/nvidia/bin/cuobjdump")):
        spec = importlib.util.find_spec(package)
        for path in (spec.submodule_search_locations or []) if spec else []:
            places += sorted(Path(path).glob(inside))
    for place in places:
        if place and (found := shutil.which(place)):
            return found
    raise NoCudaError("cuobjdump was not found; pip install --group cuda, or set CUOBJDUMP to its path")


def check() -> int:
    """Print the tables of `make cuda-check`; returns the exit status."""
    try:
        toolkit = find_toolkit()
    except NoCudaError as error:
        print(f"CUDA kernels not checked: {error}")
        return 0
    units = kernel_units(toolkit)
    try:
        compile_units(units)
    except CompileError as error:
        print(f"cuda-check: {error}", file=sys.stderr)
        return 1
    faults = []
    print(f"{'file':<16}{'architecture':<14}{'kernels':>8}{'registers':>11}{'stack B':>9}{'spills B':>10}")
    for unit in units:
        used = usage(unit.log.read_text())
        faults += usage_faults(used)
        for name, kernels in used.items():
            most = [
                max(getattr(each, what) for each in kernels.values()) for what in ("registers", "stack", "spills")
            ]
            print(f"{unit.source.name:<16}{name:<14}{len(kernels):>8}{most[0]:>11}{most[1]:>9}{most[2]:>10}")
    found: dict[tuple[str, str], Accesses] = {}
    try:
        cuobjdump = find_cuobjdump(toolkit.nvcc)
        for unit in units:
            found |= accesses(ask(cuobjdump, "-sass", str(unit.target)))
    except NoCudaError as error:
        print(f"cuda-check: the width of accesses is not known: {error}", file=sys.stderr)
        return 1
    faults += access_faults(found, [f"sm_{name}" for name in toolkit.architectures])
    print(access_table(found))
    for fault in faults:
        print(f"cuda-check: {fault}", file=sys.stderr)
    return bool(faults)


def access_table(found: dict[tuple[str, str], Accesses]) -> str:
    """A row per kernel, a column per architecture.

    A cell: loads and stores of 16 bytes, in parentheses those of less; the largest numbers of the kernel's instances.
    """
    architectures = sorted({architecture for architecture, _ in found}, key=lambda name: int(name.partition("_")[2]))
    lines = [f"{'16-byte kernel':<24}" + "".join(f"{name:>18}" for name in architectures)]
    for name in WIDE:
        cells = []
        for architecture in architectures:
            instances = [
                counts for (on, symbol), counts in found.items() if on == architecture and wide_kernel(symbol) == name
            ]
            most = [
                max((getattr(each, what) for each in instances), default=0)
                for what in ("wide_loads", "loads", "wide_stores", "stores")
            ]
            cells.append(f"{most[0]} ({most[1]}) {most[2]} ({most[3]})")
        lines.append(f"{name:<24}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(check())
