"""Builds the extension `oases._C` against the torch that is installed, and `oases._svm`, which is without torch.

Everything else is in pyproject.toml.

Kernels are compiled by csrc/cuda_build.py where there is an nvcc, whatever torch is installed: a CPU torch will do.
"""

import os
import sys
from pathlib import Path

import torch
from pybind11 import get_include
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "csrc"))

from cuda_build import cuda_part  # noqa: E402  (a build in isolation does not have this folder on its path)

# Two compilers at a time need about 3 GiB of memory.
os.environ.setdefault("MAX_JOBS", str(max(1, os.cpu_count() or 1)))


class Build(BuildExtension):
    """Kernels first: whether they are there decides how the rest is compiled."""

    def build_extensions(self) -> None:
        cuda = cuda_part(torch.version.cuda is not None)
        if cuda is not None:
            objects, link_arguments = cuda
            (extension,) = (each for each in self.extensions if each.name == "oases._C")
            extension.extra_objects = objects
            extension.extra_link_args = link_arguments
            extension.define_macros = [("OASES_WITH_CUDA", None)]
        super().build_extensions()


def sources(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in folder.glob("*.cpp"))


setup(
    ext_modules=[
        CppExtension(
            "oases._C",
            sources(ROOT / "csrc"),
            # -g0: torch's headers make debug information ten times the size of the code.
            extra_compile_args=["-O2", "-g0", "-Wall", f"-DOASES_TORCH_VERSION={torch.__version__}"],
        ),
        Extension(
            "oases._svm",
            sources(ROOT / "csrc" / "svm"),
            include_dirs=[get_include()],
            language="c++",
            extra_compile_args=["-O3", "-g0", "-Wall", "-std=c++20"],
        ),
    ],
    cmdclass={"build_ext": Build},
)
