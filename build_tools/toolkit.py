"""The CUDA toolkit to compile csrc/*.cu with: its nvcc, the architectures, and the host compiler it takes.

$NVCC: the compiler, else the one on PATH, else /usr/local/cuda/bin/nvcc, else that of the wheel nvidia-cuda-nvcc.
$OASES_CUDA_ARCHS: the architectures, such as "90", "80,90", "all" or "present", else $TORCH_CUDA_ARCH_LIST, such as
"8.6;9.0+PTX", of which entries that nvcc does not know are left out, with a line. Where neither is set, setup.py
takes those of the GPUs present, and all where there is none, for a torch with CUDA; and one for a torch without,
which can link the kernels but not run them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from build_tools import objects
from build_tools.objects import Unit, report

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
LINK_ONLY = "90"
OLDEST_HOST = 9
"""The oldest g++ that is looked for where nvcc takes not the newest: older ones do not know C++17 well."""


class NoCudaError(Exception):
    """Kernels cannot be compiled here; the message says in one line why and what to do."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc, its release such as "13.0", the architectures to compile for and where libcudart_static.a lies.

    host: the compiler of the code between kernels, "" for nvcc's own choice.
    """

    nvcc: str
    release: str
    architectures: tuple[str, ...]
    library_folder: str
    host: str = ""

    @property
    def folder(self) -> Path:
        """Where objects for these architectures lie."""
        return objects.BUILD / "cuda" / "-".join(self.architectures)

    def unit(self, source: Path) -> Unit:
        """`source` as an object in `folder`.

        PTX is kept of the newest architecture, for those to come, and of the oldest, for those between.
        """
        targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in self.architectures]
        for name in dict.fromkeys((self.architectures[0], self.architectures[-1])):
            targets.append(f"-gencode=arch=compute_{name},code=compute_{name}")
        if self.host:
            targets.append(f"-ccbin={self.host}")
        options = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "--cudart", "static", "-Xptxas", "-v")
        command = (self.nvcc, *options, f"-I{objects.ROOT / 'csrc'}", *targets)
        return Unit(source, self.folder / f"{source.stem}.o", command, f"nvcc {self.release}: ")

    def link_arguments(self) -> list[str]:
        """The runtime, linked statically: the extension then loads where there is no driver.

        Its symbols stay hidden, or the runtime that a CUDA torch has loaded would be called in their place.
        """
        return [
            f"-L{self.library_folder}", "-lcudart_static", "-lrt", "-ldl", "-lpthread",
            "-Wl,--exclude-libs,libcudart_static.a",
        ]  # fmt: skip


def find_toolkit(architectures: str = "all", torch_cuda: str | None = None) -> Toolkit:
    """The toolkit of this machine. architectures: what $OASES_CUDA_ARCHS is taken to say where it is not set.

    torch_cuda: the CUDA release of torch, whose major version nvcc must have. Raises NoCudaError where there is no
    toolkit that can be used.
    """
    usual = "/usr/local/cuda/bin/nvcc"
    places = (os.environ.get("NVCC"), shutil.which("nvcc"), shutil.which(usual), _nvcc_of_wheel())
    nvcc = next((place for place in places if place), usual)
    if shutil.which(nvcc) is None:
        raise NoCudaError(
            f"{nvcc} was not found; install the CUDA toolkit, or the wheel nvidia-cuda-nvcc, or set NVCC to the path "
            "of an nvcc"
        )
    release = re.search(r"release (\d+\.\d+)", ask(nvcc, "--version"))
    known = set(re.findall(r"compute_(\d+)", ask(nvcc, "--list-gpu-arch")))
    # nvcc may be a script or a link that lies elsewhere; it knows its own libraries.
    folders = re.findall(r'"-L([^"]+)"', ask(nvcc, "-dryrun", "-c", "/dev/null", "-x", "cu", "-o", "/dev/null"))
    library = next((folder for folder in folders if Path(folder, "libcudart_static.a").exists()), None)
    if release is None or library is None:
        raise NoCudaError(f"{nvcc} has no release or no libcudart_static.a; install a whole CUDA toolkit")
    if torch_cuda is not None and release[1].partition(".")[0] != (major := torch_cuda.partition(".")[0]):
        raise NoCudaError(
            f"{nvcc} is of CUDA {release[1]} and torch of CUDA {torch_cuda}; set NVCC to an nvcc of CUDA {major}"
        )
    return Toolkit(nvcc, release[1], _architectures(architectures, nvcc, known), library, _host_compiler(nvcc))


def _nvcc_of_wheel() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    return next(
        (found for folder in folders for path in folder.glob("*/bin/nvcc") if (found := shutil.which(path))), None
    )


def ask(program: str, *arguments: str) -> str:
    """Output of a program of the toolkit. Raises NoCudaError where it fails."""
    answer = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
        raise NoCudaError(f"'{program} {arguments[0]}' failed: {said.splitlines()[0]}; install one that works")
    return answer.stdout + answer.stderr


def _host_compiler(nvcc: str) -> str:
    """A g++ that nvcc takes where it takes not its own choice, which is then too new; "" elsewhere."""
    tried = subprocess.run(
        [nvcc, "-E", "-x", "cu", "/dev/null", "-o", "/dev/null"], capture_output=True, text=True, check=False
    )
    refused = re.search(r"unsupported GNU version! gcc versions later than (\d+)", tried.stdout + tried.stderr)
    if refused is None:
        return ""
    newest = int(refused[1])
    for version in range(newest, OLDEST_HOST - 1, -1):
        if found := shutil.which(f"g++-{version}"):
            report(f"oases: {nvcc} takes no g++ later than {newest}; it compiles with {found}")
            return found
    raise NoCudaError(f"{nvcc} takes no g++ later than {newest}; install g++-{newest}, or a newer CUDA toolkit")


def _architectures(default: str, nvcc: str, known: set[str]) -> tuple[str, ...]:
    asked = os.environ.get("OASES_CUDA_ARCHS", "").strip()
    if not asked and (of_torch := os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()):
        # "9.0a" is 9.0 with instructions that these kernels do not use.
        names = {
            entry: re.sub(r"^(\d+)\.(\d)[af]?$", r"\1\2", entry.removesuffix("+PTX")) for entry in _parts(of_torch)
        }
        asked = ",".join(_known(names, nvcc, known, "TORCH_CUDA_ARCH_LIST"))
    asked = asked or default
    if asked == "present":
        asked = ",".join(_known(gpus_present(), nvcc, known, "a GPU")) or "all"
    if asked == "all":
        found = tuple(name for name in ARCHITECTURES if name in known)
        if not found:
            raise NoCudaError(f"{nvcc} knows none of the architectures {', '.join(ARCHITECTURES)}; install another")
        return found
    names_asked = _in_order(_parts(asked))
    for name in names_asked:
        if name not in known:
            raise NoCudaError(f"OASES_CUDA_ARCHS names {name!r}, and {nvcc} knows {', '.join(_in_order(known))}")
    return names_asked


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r"[\s,;]+", text) if part]


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=lambda name: (len(name), name)))


def _known(names: Mapping[str, str], nvcc: str, known: set[str], source: str) -> list[str]:
    """Architectures that nvcc knows, of those named by `source`, by its words for them; a line for each other."""
    for words in [words for words, name in names.items() if name not in known]:
        report(f"oases: no kernels for {words!r} of {source}: {nvcc} knows {', '.join(_in_order(known))}")
    return [name for name in names.values() if name in known]


def gpus_present() -> dict[str, str]:
    """Architectures of the GPUs present, by the driver's word for each: "90" by "9.0"."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        said = (answer.stdout + answer.stderr).strip().splitlines() or [f"exit code {answer.returncode}"]
        report(f"oases: kernels for all architectures, because nvidia-smi says not which GPU is here: {said[0]}")
        return {}
    return {line: line.replace(".", "") for line in answer.stdout.split()}
