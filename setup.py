"""Build `oases._C` and `oases_staged._C` against the torch that is installed, and `oases._svm`, which is without.

Everything else is in pyproject.toml.

torch's headers cost more to compile than csrc, so csrc is compiled as three units, each of which includes many of its
files; $OASES_UNITY=0 makes an object of each file, for work on one of them. Kernels are compiled beside them where
there is an nvcc (build_tools/cuda_build.py), whatever torch is installed: a CPU torch will do. A CUDA torch without
them is an error, unless $OASES_CUDA is 0.
"""

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

from build_tools.cuda_build import kernel_units, leave_out, wanted_toolkit
from build_tools.dependencies import dependencies
from build_tools.objects import BUILD, ROOT, CompileError, Unit, compile_units, report
from build_tools.toolkit import Toolkit

CSRC = ROOT / "csrc"
FOLDERS = {"core": CSRC, "staged": CSRC / "staged"}
"""Sources of the two extensions with torch, by the name of their unit."""
ALONE = ("bindings.cpp",)  # half of the work: pybind11
LIBRARIES = ["c10", "torch", "torch_cpu", "torch_python"]


class Objects:
    """The objects of the extensions. Imports torch, which an sdist is made without."""

    def __init__(self) -> None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # what registers may be broken, or an older oases
        import torch
        from torch.utils.cpp_extension import get_cxx_compiler, include_paths

        self.torch = torch
        self.folder = BUILD / "objects" / f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
        headers = [option for path in include_paths() for option in ("-isystem", path)]
        # -g0: torch's headers make debug information ten times the size of the code.
        self.compiler = (
            get_cxx_compiler(), "-std=c++20", "-g0", "-Wall", "-DNDEBUG", "-fPIC", f"-I{CSRC}",
            *headers, "-isystem", sysconfig.get_path("include"), *shlex.split(os.environ.get("CXXFLAGS", "")),
        )  # fmt: skip

    def with_torch(self, name: str, folder: Path, cuda: bool) -> list[Unit]:
        """Units of an extension with sources in `folder`, without kernels. name: of its objects' folder."""
        options = ["-O2", f"-DOASES_TORCH_VERSION={self.torch.__version__}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        command = (*self.compiler, *options, *(["-DOASES_WITH_CUDA"] if cuda else []))
        sources = sorted(folder.glob("*.cpp"))
        if os.environ.get("OASES_UNITY") != "0":
            alone = [path for path in sources if path.name in ALONE]
            sources = [self.unity(name, [path for path in sources if path not in alone]), *alone]
        return [Unit(path, self.folder / name / f"{path.stem}.o", command) for path in sources]

    def unity(self, name: str, sources: Sequence[Path]) -> Path:
        """Path of a file that includes `sources`; written anew only where they are others."""
        path = self.folder / name / f"{name}.cpp"
        text = "".join(f'#include "{source}"\n' for source in sources)
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return path

    def svm(self) -> list[Unit]:
        """Units of `oases._svm`."""
        sources = sorted((CSRC / "svm").glob("*.cpp"))  # module.cpp takes longer, and comes first
        return [Unit(path, self.folder / "svm" / f"{path.stem}.o", (*self.compiler, "-O3")) for path in sources]


class Build(build_ext):
    """Compiles the objects of all extensions at once; setuptools links them."""

    def build_extensions(self) -> None:
        """Without kernels where they do not compile, torch has no CUDA and $OASES_CUDA does not ask for them."""
        objects = Objects()
        torch_cuda = objects.torch.version.cuda
        toolkit = wanted_toolkit(torch_cuda)
        report(f"oases: building against torch {objects.torch.__version__} of {Path(objects.torch.__file__).parent}")
        try:
            self.compile(objects, toolkit)
        except CompileError as error:
            if toolkit is None or error.unit not in kernel_units(toolkit):
                raise SystemExit(f"{error.output}\noases: error: {error}") from None
            leave_out(error, torch_cuda)
            self.compile(objects, None)
        # Debian's Python binds a library's calls to itself where it is linked: no other function can take the place
        # of one then, as emulated kernels do in tests.
        for name in ("linker_so", "linker_so_cxx"):
            if hasattr(self.compiler, name):
                linker = [each for each in getattr(self.compiler, name) if each != "-Wl,-Bsymbolic-functions"]
                setattr(self.compiler, name, linker)
        # setuptools looks at times alone: a file linked for another torch may be newer.
        self.force = self.compiler.force = True
        super().build_extensions()

    def compile(self, objects: Objects, toolkit: Toolkit | None) -> None:
        """Compile all objects and hand them to the extensions. Raises CompileError."""
        from torch.utils.cpp_extension import library_paths

        cuda = toolkit is not None
        core, staged = (objects.with_torch(name, folder, cuda) for name, folder in FOLDERS.items())
        kernels = [] if toolkit is None else kernel_units(toolkit)
        svm = objects.svm()
        compile_units([*core, *staged, *svm, *kernels])
        in_staged = [unit for unit in kernels if unit.source.parent == FOLDERS["staged"]]
        in_core = [unit for unit in kernels if unit not in in_staged]
        in_staged += [unit for unit in kernels if unit.source.stem == "device"]  # sets the device of its own runtime
        parts = (core + in_core, staged + in_staged, svm)
        for extension, units in zip(self.extensions, parts, strict=True):
            extension.extra_objects = [str(unit.target) for unit in units]
        for extension in self.extensions[:2]:
            extension.libraries, extension.library_dirs = LIBRARIES, library_paths()
            extension.extra_link_args = [] if toolkit is None else toolkit.link_arguments()


def description() -> str:
    """README without its links to files of the repository, which lead nowhere on a package index."""
    return re.sub(r"!?\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", (ROOT / "README.md").read_text())


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    install_requires=dependencies(),
    ext_modules=[Extension(name, [], language="c++") for name in ("oases._C", "oases_staged._C", "oases._svm")],
    cmdclass={"build_ext": Build},
)
