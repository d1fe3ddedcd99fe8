"""Compile csrc/*.cu with plain nvcc, without torch: for setup.py, and for `make cuda-check`.

    python -m build_tools.cuda_build     print what ptxas says of registers and spills, and the width of stores

$NVCC: the compiler, else the one on PATH, else /usr/local/cuda/bin/nvcc, else that of the wheel nvidia-cuda-nvcc.
$OASES_CUDA_ARCHS: the architectures, such as "90", "80,90" or "all", else $TORCH_CUDA_ARCH_LIST, such as
"8.6;9.0+PTX". Where neither is set, setup.py takes all for a torch with CUDA, and one for a torch without, which can
link the kernels but not run them. $OASES_CUDA: 0 leaves CUDA out, 1 makes its absence an error. Objects lie in
build/cuda/<architectures>, each beside the log of its compilation.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from build_tools import objects
from build_tools.objects import CompileError, Unit, compile_units, report

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
LINK_ONLY = "90"
NEVER_SPILL = ("norm", "activation")
"""Files whose kernels must keep everything in registers: they are bound by memory, and a spill is memory."""
WIDE = re.compile(
    r"(forward_kernel|backward_kernel|gelu_kernel|swiglu_kernel|combine|gather|pack)\w*?"
    r"(I6__half\w?\w*?Li8E|I13__nv_bfloat16\w*?Li8E|If\w*?Li4E|I5uint4)"
)
"""Mangled names of kernels that move 16 bytes at a time, by their template's arguments."""
NARROW = 4
"""A wide kernel has fewer stores of 2 bytes, such as of one number per row; a pack that is split makes as many."""


class NoCudaError(Exception):
    """Kernels cannot be compiled here; the message says in one line why and what to do."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc, its release such as "13.0", the architectures to compile for and where libcudart_static.a lies."""

    nvcc: str
    release: str
    architectures: tuple[str, ...]
    library_folder: str

    @property
    def folder(self) -> Path:
        """Where objects for these architectures lie."""
        return objects.BUILD / "cuda" / "-".join(self.architectures)

    def unit(self, source: Path) -> Unit:
        """`source` as an object in `folder`. The last architecture is kept as PTX too, for those to come."""
        targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in self.architectures]
        newest = self.architectures[-1]
        targets.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
        options = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "--cudart", "static", "-Xptxas", "-v", *targets)
        return Unit(source, self.folder / f"{source.stem}.o", (self.nvcc, *options), f"nvcc {self.release}: ")

    def link_arguments(self) -> list[str]:
        """The runtime, linked statically: the extension then loads where there is no driver.

        Its symbols stay hidden, or the runtime that a CUDA torch has loaded would be called in their place.
        """
        return [
            f"-L{self.library_folder}", "-lcudart_static", "-lrt", "-ldl", "-lpthread",
            "-Wl,--exclude-libs,libcudart_static.a",
        ]  # fmt: skip


def find_toolkit(architectures: str = "all") -> Toolkit:
    """The toolkit of this machine. architectures: what $OASES_CUDA_ARCHS is taken to say where it is not set.

    Raises NoCudaError where there is no toolkit that can be used.
    """
    usual = "/usr/local/cuda/bin/nvcc"
    places = (os.environ.get("NVCC"), shutil.which("nvcc"), shutil.which(usual), _nvcc_of_wheel())
    nvcc = next((place for place in places if place), usual)
    if shutil.which(nvcc) is None:
        raise NoCudaError(f"{nvcc} was not found; install the CUDA toolkit or set NVCC to the path of its nvcc")
    release = re.search(r"release (\d+\.\d+)", _ask(nvcc, "--version"))
    known = set(re.findall(r"compute_(\d+)", _ask(nvcc, "--list-gpu-arch")))
    # nvcc may be a script or a link that lies elsewhere; it knows its own libraries.
    folders = re.findall(r'"-L([^"]+)"', _ask(nvcc, "-dryrun", "-c", "/dev/null", "-x", "cu", "-o", "/dev/null"))
    library = next((folder for folder in folders if Path(folder, "libcudart_static.a").exists()), None)
    if release is None or library is None:
        raise NoCudaError(f"{nvcc} has no release or no libcudart_static.a; install a whole CUDA toolkit")
    return Toolkit(nvcc, release[1], _architectures(_asked() or architectures, nvcc, known), library)


def _nvcc_of_wheel() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    return next(
        (found for folder in folders for path in folder.glob("*/bin/nvcc") if (found := shutil.which(path))), None
    )


def _asked() -> str:
    """Architectures that the environment asks for, in the form of $OASES_CUDA_ARCHS; "" for none."""
    of_torch = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return os.environ.get("OASES_CUDA_ARCHS") or re.sub(r"\+PTX|\.", "", of_torch).strip()


def _ask(nvcc: str, *arguments: str) -> str:
    answer = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
        raise NoCudaError(f"'{nvcc} {arguments[0]}' failed: {said.splitlines()[0]}; install one that works")
    return answer.stdout + answer.stderr


def _architectures(asked: str, nvcc: str, known: set[str]) -> tuple[str, ...]:
    if asked == "all":
        found = tuple(name for name in ARCHITECTURES if name in known)
        if not found:
            raise NoCudaError(f"{nvcc} knows none of the architectures {', '.join(ARCHITECTURES)}; install another")
        return found
    names = tuple(sorted(set(re.split(r"[\s,;]+", asked.strip())), key=lambda name: (len(name), name)))
    for name in names:
        if name not in known:
            shown = ", ".join(sorted(known, key=int))
            source = "OASES_CUDA_ARCHS" if os.environ.get("OASES_CUDA_ARCHS") else "TORCH_CUDA_ARCH_LIST"
            raise NoCudaError(f"{source} names {name!r}, and {nvcc} knows {shown}")
    return names


def kernel_units(toolkit: Toolkit) -> list[Unit]:
    """Every csrc/*.cu as a unit to compile."""
    return [toolkit.unit(source) for source in sorted((objects.ROOT / "csrc").glob("*.cu"))]


def wanted_toolkit(torch_has_cuda: bool) -> Toolkit | None:
    """The toolkit to compile kernels with; None where they are left out, with one line why."""
    wanted = os.environ.get("OASES_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"oases: error: OASES_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    try:
        return find_toolkit("all" if torch_has_cuda else LINK_ONLY)
    except NoCudaError as error:
        leave_out(error)
        return None


def leave_out(error: Exception) -> None:
    """Say why the kernels are left out. Raises SystemExit where $OASES_CUDA is 1."""
    if os.environ.get("OASES_CUDA") == "1":
        raise SystemExit(f"oases: error: OASES_CUDA=1, but {error}")
    report(f"oases: building without CUDA kernels: {error} (OASES_CUDA=0 asks for that)")


@dataclass
class Usage:
    """The largest use of any kernel of one file on one architecture."""

    kernels: int = 0
    registers: int = 0
    stack: int = 0
    spills: int = 0


def usage(log: str) -> dict[str, Usage]:
    """Resource usage printed by ptxas -v, by architecture ("sm_90"); stack and spills in bytes per thread."""
    found: dict[str, Usage] = {}
    current = Usage()
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '.*' for '(sm_\w+)'", line):
            current = found.setdefault(match[1], Usage())
            current.kernels += 1
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.stack = max(current.stack, int(match[1]))
            current.spills = max(current.spills, int(match[2]) + int(match[3]))
        elif match := re.search(r"Used (\d+) registers", line):
            current.registers = max(current.registers, int(match[1]))
    return found


def narrow_kernels(sass: str) -> tuple[list[str], int]:
    """Wide kernels that do not load and store 16 bytes at a time, with their architecture, and the number of all wide
    ones, in the output of cuobjdump -sass.
    """
    architecture, found, wide = "", [], 0
    for part in re.split(r"^\s*(?=Function : |arch = )", sass, flags=re.MULTILINE):
        if match := re.match(r"arch = (\w+)", part):
            architecture = match[1]
        match = re.match(r"Function : (\S+)", part)
        if match is None or not WIDE.search(match[1]):
            continue
        wide += 1
        loads, stores = (len(re.findall(rf"\b{op}\.E\S*\.128", part)) for op in ("LDG", "STG"))
        narrow = len(re.findall(r"\bSTG\.E\S*\.[US]16", part))
        stored = stores or "4pack" in match[1]  # a bitmap: it stores bits
        if not loads or not stored or narrow >= NARROW:
            found.append(f"{match[1]} on {architecture}")
    return found, wide


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
    raise NoCudaError("cuobjdump was not found; pip install -r requirements-cuda.txt, or set CUOBJDUMP to its path")


def check() -> int:
    """Print the table of `make cuda-check`; returns the exit status."""
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
    spilling = []
    print(f"{'file':<16}{'architecture':<14}{'kernels':>8}{'registers':>11}{'stack B':>9}{'spills B':>10}")
    for unit in units:
        file = unit.source.name
        for name, worst in usage(unit.log.read_text()).items():
            print(f"{file:<16}{name:<14}{worst.kernels:>8}{worst.registers:>11}{worst.stack:>9}{worst.spills:>10}")
            if worst.spills and unit.source.stem in NEVER_SPILL:
                spilling.append(f"{file} on {name}")
    if spilling:
        print(f"cuda-check: registers spill to memory in {', '.join(spilling)}", file=sys.stderr)
    try:
        cuobjdump = find_cuobjdump(toolkit.nvcc)
        read = [narrow_kernels(_ask(cuobjdump, "-sass", str(unit.target))) for unit in units]
    except NoCudaError as error:
        print(f"cuda-check: the width of stores is not known: {error}", file=sys.stderr)
        return 1
    narrow, wide = [name for names, _ in read for name in names], sum(kernels for _, kernels in read)
    print(f"{wide - len(narrow)} of {wide} wide kernels load and store 16 bytes at a time")
    for name in narrow:
        print(f"cuda-check: no access of 16 bytes in {name}", file=sys.stderr)
    return bool(spilling or narrow)


if __name__ == "__main__":
    sys.exit(check())
