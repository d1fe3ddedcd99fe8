"""Builds the extension `oases._C` against the torch that is installed. Everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
# Two compilers at a time need about 3 GiB of memory.
os.environ.setdefault("MAX_JOBS", str(max(1, os.cpu_count() or 1)))

setup(
    ext_modules=[
        CppExtension(
            "oases._C",
            sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp")),
            # -g0: torch's headers make debug information ten times the size of the code.
            extra_compile_args=["-O2", "-g0", "-Wall"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
