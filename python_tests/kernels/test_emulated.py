"""The CUDA kernels on the CPU (cpp_tests/emulated), by the tests that a GPU would run, and bugs seeded into them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import objects
from build_tools.objects import Unit, compile_units

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cpp_tests" / "emulated"
CHECKED = ("-fsanitize=thread,alignment,bounds,shift", "-fno-extern-tls-init", "-ffp-contract=off")
"""Calls before every access to memory, which machine.cpp answers; shared memory without constructors; roundings as on
the CPU.
"""
OPTIONS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-w", *(f"-I{path}" for path in (FOLDER, FOLDER / "include")))
KERNELS = ("norm", "activation", "permute", "bitmap", "sketch", "quantize")
LAUNCHERS = {
    "norm_forward", "norm_backward", "gelu", "gelu_backward", "swiglu", "swiglu_backward", "bitmap_pack",
    "bitmap_count", "bitmap_list", "count_experts", "place_slots", "gather_rows", "invert", "combine_rows",
    "combine_rows_backward", "sketch_cells", "sketch_encode", "sketch_decode", "quantize_sum",
    "sum_parts", "dequantize",
}  # fmt: skip
LEFT_OUT = (
    "not opcheck and not fullgraph and not heavy_entries and not unbiased and not ((6200 or 1100) and float16) "
    "and not ((20000 or 20001) and (rms or float16))"
)
"""The ops on the meta device and compiled; statistics of the sketch's hash, over more keys and seeds than its kernels
need; the largest cases, in every type and kind: their plans are those of the others.
"""

SOME = (
    "one_result_unused or rows_far_apart or far_from_zero or (swiglu and 520) or (pack_and_unpack and 31 and 1000) "
    "or (gradients and rows and 100) or views_with_strides or tables_add_up or hidden_by_the_median "
    "or codes_and or a_sum_is_that"
)
"""A few cases of each kernel, which launch all of them."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fibers and shared memory lie as on Linux")


def units(sources, folder):
    """Kernels of a folder of sources as objects for the emulation, with the emulation itself."""
    compiler = ("c++", *OPTIONS, f"-I{sources}")
    kernels = [Unit(sources / f"{name}.cu", folder / f"{name}.o", (*compiler, *CHECKED, "-xc++")) for name in KERNELS]
    return [*kernels, *(Unit(path, folder / f"{path.stem}.o", compiler) for path in sorted(FOLDER.glob("*.cpp")))]


def linked(made, path):
    # Without -fsanitize: no sanitizer's library, whose place machine.cpp takes.
    subprocess.run(["c++", "-shared", "-Wl,-Bsymbolic", *map(str, made), "-ldl", "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def library():
    folder = objects.BUILD / "emulated"
    compile_units(units(ROOT / "csrc", folder))
    return linked(sorted(folder.glob("*.o")), folder / "libemulated.so")


def run_with(library, program, *arguments, **environment):
    """A process in which oases._C calls the emulated launchers for tensors on the CPU."""
    first = "import ctypes, sys; ctypes.CDLL(sys.argv.pop(1), ctypes.RTLD_GLOBAL)\n"
    command = [sys.executable, "-c", first + program, str(library), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cases", [SOME, LEFT_OUT], ids=["some", "all"])
def test_kernels_agree_with_their_cpu_twins(library, tmp_path, cases):
    # The outer run's options, such as -n, are not for this one.
    files = [f"python_tests/kernels/test_{name}.py" for name in KERNELS]
    done = run_with(
        library, "import pytest; sys.exit(pytest.main(sys.argv[1:]))", "-q", "-x", "-p", "no:cacheprovider",
        "-m", "not gpu and not slow", "-k", cases, *files,
        OASES_EMULATED_CALLS=str(tmp_path / "calls"), PYTEST_ADDOPTS="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    calls = dict(line.split() for line in (tmp_path / "calls").read_text().splitlines())
    assert set(calls) == LAUNCHERS


SEEDED = {
    "a missing barrier": (
        "bitmap", "bitmap.cu", "if (lane == 0) used[within] = (votes & of_row) != 0;\n    __syncthreads();",
        "if (lane == 0) used[within] = (votes & of_row) != 0;", "a read of memory that nobody has written",
    ),
    "a missing barrier between two sums": (
        "norm", "device.h", "__syncthreads();  // all threads have read the previous sum", "",
        "a race: a write without a barrier since the read",
    ),
    "off by one": (
        "bitmap", "bitmap.cu", "if (u + step * lanes < units)", "if (u + step * lanes <= units)",
        "a read of 4 bytes out of bounds",
    ),
    "an unaligned store": (
        "activation", "activation.cu", "pack[i] + added[i]));\n    pack.store(out + row * n + column);",
        "pack[i] + added[i]));\n    pack.store(out + row * n + column + 1);", "an address that is not aligned",
    ),
    "a divergent barrier": (
        "bitmap", "bitmap.cu", "if (lane == kWarp - 1) of_warps[warp] = sum;\n  __syncthreads();",
        "if (lane == kWarp - 1) of_warps[warp] = sum;\n  if (warp > 0) __syncthreads();", "a divergent barrier",
    ),
}  # fmt: skip
"""The kernels, the file, its text, the bug in its place, what is found."""
OPS = """
import torch, oases.kernels
ops, name, x = torch.ops.oases, sys.argv[1], torch.randn(9, 1000)
if name == "activation":
    ops.bias_gelu(x, None, "none")
elif name == "norm":
    ops.bias_dropout_residual_norm(x, x, None, x[0], None, 0.0, 1, 0, "layer", 1e-5)
else:
    ops.bitmap_unpack(ops.bitmap_pack(0 * x), 9)
"""


@pytest.mark.long
@pytest.mark.parametrize("bug", SEEDED)
def test_a_seeded_bug_is_found(library, tmp_path, bug):
    kernels, file, text, wrong, found = SEEDED[bug]
    source = (ROOT / "csrc" / file).read_text()
    assert source.count(text) == 1
    shutil.copytree(ROOT / "csrc", tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(source.replace(text, wrong))
    unit = next(unit for unit in units(tmp_path, tmp_path) if unit.source.stem == kernels)
    unit.compile()
    others = [path for path in library.parent.glob("*.o") if path.name != unit.target.name]
    done = run_with(linked([unit.target, *others], tmp_path / "libemulated.so"), OPS, kernels)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"emulated: {found}" in last
    assert "at " in last, "the place"
