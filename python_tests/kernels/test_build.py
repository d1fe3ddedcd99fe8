"""Build of the CUDA kernels, or without them, with a shell script as nvcc (conftest.py); the build information."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oases
from build_tools import cuda_build, objects, toolkit
from oases import cli
from oases.extension import build_info, build_text
from oases_staged.built import mismatch, why_unfit

pytestmark = pytest.mark.usefixtures("tree")


def compilations(folder):
    return len((folder / "compiled").read_text().splitlines())


def with_gpus(monkeypatch, found=None):
    monkeypatch.setattr(cuda_build, "gpus_present", lambda: {"9.0": "90"} if found is None else found)


def compile_kernels():
    units = cuda_build.kernel_units(cuda_build.wanted_toolkit("12.4"))
    objects.compile_units(units)
    return units


def test_kernels_are_compiled_once(nvcc, monkeypatch):
    (unit,) = compile_kernels()
    assert unit.target == nvcc / "build" / "cuda" / "80-90" / "one.o"
    assert f"-L{nvcc}" in toolkit.find_toolkit().link_arguments()
    compile_kernels()
    assert compilations(nvcc) == 1
    log = unit.log.read_text()
    assert "compute_80,code=sm_80" in log
    assert "compute_90,code=compute_90" in log, "PTX of the newest architecture, for those to come"
    assert "compute_80,code=compute_80" in log, "and of the oldest, for those between"
    assert "compute_70" not in log, "known to this nvcc, but not on the list"
    monkeypatch.setenv("OASES_CUDA_ARCHS", "90")
    (other,) = compile_kernels()
    assert compilations(nvcc) == 2, "other architectures, other objects"
    assert "sm_80" not in other.log.read_text()
    assert other.log.read_text().count("code=compute_90") == 1
    os.utime(nvcc / "csrc" / "one.cu", (2e9, 2e9))
    compile_kernels()
    assert compilations(nvcc) == 3, "the source is newer"


def test_an_architecture_that_nvcc_does_not_know(nvcc, monkeypatch):
    monkeypatch.setenv("OASES_CUDA_ARCHS", "80,120")
    with pytest.raises(toolkit.NoCudaError, match=r"'120'.* knows 70, 80, 90"):
        toolkit.find_toolkit()


def test_architectures_asked_of_torch_are_honoured(nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert toolkit.find_toolkit().architectures == ("80", "90")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert toolkit.find_toolkit().architectures == ("90",)
    monkeypatch.setenv("OASES_CUDA_ARCHS", "80")
    assert toolkit.find_toolkit().architectures == ("80",), "the project's own goes before torch's"
    monkeypatch.delenv("OASES_CUDA_ARCHS")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    assert toolkit.find_toolkit().architectures == ("80", "90"), "nothing of 9.0a is used"


def test_architectures_that_nvcc_does_not_know_are_left_out_with_a_line(nvcc, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "5.2;8.0;Hopper")
    assert toolkit.find_toolkit().architectures == ("80",)
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"oases: no kernels for {name!r} of TORCH_CUDA_ARCH_LIST: ") for line, name in
            zip(lines, ("5.2", "Hopper"), strict=True)] == [True, True]  # fmt: skip
    assert all(line.endswith("nvcc knows 70, 80, 90") for line in lines)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    assert toolkit.find_toolkit().architectures == ("80", "90"), "none is left: as if it were not set"


def gpus(folder, text, status=0):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
    path.chmod(0o755)


def test_the_gpus_present_are_compiled_for(nvcc, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{nvcc}:/usr/bin:/bin")

    def architectures():
        return cuda_build.wanted_toolkit("12.4").architectures

    if not os.access("/usr/bin/nvidia-smi", os.X_OK):
        assert architectures() == ("80", "90"), "no GPU: all that this nvcc and oases know"
    gpus(nvcc, "9.0\\n9.0\\n")
    assert architectures() == ("90",)
    gpus(nvcc, "8.0\\n7.0\\n")
    assert architectures() == ("70", "80")
    gpus(nvcc, "12.0\\n")
    capsys.readouterr()
    assert architectures() == ("80", "90"), "one that nvcc does not know runs what is kept as PTX"
    assert "no kernels for '12.0' of a GPU" in capsys.readouterr().err
    gpus(nvcc, "Driver/library version mismatch\\n", 18)
    assert architectures() == ("80", "90")
    assert "nvidia-smi says not which GPU is here: Driver/library version mismatch" in capsys.readouterr().err
    monkeypatch.setenv("OASES_CUDA_ARCHS", "all")
    gpus(nvcc, "9.0\\n")
    assert architectures() == ("80", "90"), "for wheels"


def test_another_major_version_than_torch_s_is_refused(nvcc, monkeypatch):
    assert cuda_build.wanted_toolkit("12.8").release == "12.4", "minor versions run together"
    with_gpus(monkeypatch)
    with pytest.raises(
        SystemExit, match=r"nvcc is of CUDA 12\.4 and torch of CUDA 13\.0; set NVCC to an nvcc of CUDA 13 "
    ):
        cuda_build.wanted_toolkit("13.0")


def test_a_host_compiler_that_is_too_new(nvcc, monkeypatch, capsys):
    script = nvcc / "nvcc"
    refusal = "#error -- unsupported GNU version! gcc versions later than 13 are not supported!"
    script.write_text(script.read_text().replace("-E) ;;", f'-E) echo "{refusal}" >&2; exit 1;;'))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(toolkit.NoCudaError, match=r"takes no g\+\+ later than 13; install g\+\+-13"):
        toolkit.find_toolkit()
    for version in (12, 13, 14):
        (nvcc / f"g++-{version}").write_text("#!/bin/sh\n")
        (nvcc / f"g++-{version}").chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc}:/usr/bin:/bin")
    (unit,) = compile_kernels()
    assert "g++-13" in capsys.readouterr().err
    assert f"-ccbin={nvcc}/g++-13" in unit.log.read_text()


def test_nvcc_of_the_wheel_is_found(nvcc, monkeypatch):
    folder = nvcc / "site" / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (nvcc / "nvcc").rename(folder / "nvcc")
    monkeypatch.delenv("NVCC")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.syspath_prepend(str(nvcc / "site"))
    if not os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        assert toolkit.find_toolkit().nvcc == str(folder / "nvcc")


def test_without_nvcc_one_line_says_why(monkeypatch, capsys):
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    message = "/nowhere/nvcc was not found; install the CUDA toolkit, or the wheel nvidia-cuda-nvcc, or set NVCC"
    assert cuda_build.wanted_toolkit(None) is None
    error = capsys.readouterr().err
    assert error.startswith(f"oases: building without CUDA kernels: {message}")
    assert error.count("\n") == 1
    with_gpus(monkeypatch, {})
    assert cuda_build.wanted_toolkit("13.0") is None, "the torch that pip installs has CUDA on every machine"
    with_gpus(monkeypatch)
    with pytest.raises(SystemExit, match=f"torch is built for CUDA 13.0, but {message}.*OASES_CUDA=0 builds oases"):
        cuda_build.wanted_toolkit("13.0")
    monkeypatch.setenv("OASES_CUDA", "1")
    with pytest.raises(SystemExit, match=f"OASES_CUDA=1, but {message}"):
        cuda_build.wanted_toolkit(None)
    monkeypatch.setenv("OASES_CUDA", "0")
    capsys.readouterr()
    assert cuda_build.wanted_toolkit("13.0") is None
    assert capsys.readouterr().err == ""


def test_a_kernel_that_does_not_compile(nvcc, monkeypatch, capsys):
    (nvcc / "broken").touch()
    with pytest.raises(objects.CompileError, match=r"nvcc failed on csrc/one\.cu: .*error: no such thing") as caught:
        compile_kernels()
    assert caught.value.unit.source.name == "one.cu"
    cuda_build.leave_out(caught.value, None)
    assert "building without CUDA kernels: nvcc failed on csrc/one.cu" in capsys.readouterr().err
    with_gpus(monkeypatch)
    with pytest.raises(SystemExit, match=r"torch is built for CUDA 12\.4, but nvcc failed on .*OASES_CUDA=0"):
        cuda_build.leave_out(caught.value, "12.4")
    monkeypatch.setenv("OASES_CUDA", "1")
    with pytest.raises(SystemExit, match="OASES_CUDA=1, but nvcc failed on"):
        cuda_build.leave_out(caught.value, None)


def test_oases_cuda_is_0_or_1(monkeypatch):
    monkeypatch.setenv("OASES_CUDA", "yes")
    with pytest.raises(SystemExit, match="OASES_CUDA must be 0 or 1, got 'yes'"):
        cuda_build.wanted_toolkit(None)


def test_a_build_says_what_it_is(capsys):
    info = build_info()
    assert info["torch"] == torch.__version__
    assert bool(info["nvcc"]) == info["cuda"] == bool(info["architectures"])
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    line = capsys.readouterr().out
    assert line == f"oases {oases.__version__} (torch {torch.__version__})\n"
    kernels = f"{' '.join(info['architectures'])} by nvcc {info['nvcc']}" if info["cuda"] else "none"
    assert build_text() == f"torch {torch.__version__}; CUDA kernels: {kernels}"
    assert str(oases.report()).splitlines()[-1] == f"built with {build_text()}"


def test_a_torch_without_cuda_needs_one_architecture_to_link(nvcc, monkeypatch):
    assert cuda_build.wanted_toolkit(None).architectures == ("90",)
    monkeypatch.setenv("OASES_CUDA_ARCHS", "all")
    assert cuda_build.wanted_toolkit(None).architectures == ("80", "90")


def test_another_torch_is_refused_in_a_sentence(tmp_path):
    extension = tmp_path / "_C.so"
    extension.write_bytes(b"\x7fELF..oases was built against torch 2.13.0+cpu\0..")
    assert mismatch(extension, "2.13.1+cu130") == ""
    for other in ("2.12.1+cpu", "2.14.0", "3.13.0", "2.1.3"):
        assert f"built against torch 2.13.0+cpu, but torch {other} is" in mismatch(extension, other)
    extension.write_bytes(b"\x7fELF")
    assert "does not say which torch" in mismatch(extension, "2.13.0")
    for name in ("oases._C", "oases_staged._C"):
        assert why_unfit(name, torch.__version__) == ""
        assert "build oases again" in why_unfit(name, "2.1.3")
    assert "oases._Missing is not compiled for this Python; run make build" in why_unfit("oases._Missing", "2.13.0")


@pytest.mark.long
@pytest.mark.parametrize(
    ("extension", "error"), [("oases.extension", "ExtensionError"), ("oases_staged.extension", "ImportError")]
)
def test_an_extension_for_another_torch_is_not_loaded(extension, error):
    script = f"import torch; torch.__version__ = '2.1.3'; import {extension}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"{error}: oases was built against torch " in done.stderr


def test_a_driver_that_is_too_old_is_named(tmp_path):
    """`check_driver` of csrc/kernels.h, which the first use of a GPU calls."""
    program = tmp_path / "driver.cpp"
    program.write_text(
        """#include <cstdio>
#include <cstdlib>
#include "kernels.h"
int main(int, char** given) try {
  oases::cuda::check_driver(std::atoi(given[1]), 13020);
} catch (const std::runtime_error& error) {
  std::puts(error.what());
}
"""
    )
    csrc = Path(oases.__file__).parents[1] / "csrc"
    subprocess.run(["c++", "-std=c++17", f"-I{csrc}", str(program), "-o", str(tmp_path / "driver")], check=True)

    def said(driver):
        return subprocess.run([tmp_path / "driver", str(driver)], capture_output=True, text=True, check=True).stdout

    assert said(13000) == said(14010) == "", "a driver of the same major version, or a later one"
    compiled = "but the kernels of oases were compiled by the toolkit of CUDA 13.2; update the driver, or build oases"
    assert (
        said(12080)
        == f"the GPU's driver is for CUDA 12.8, {compiled} again with an nvcc of CUDA 12 (NVCC=its path)\n"
    )
    assert said(0).startswith(f"there is no GPU driver, {compiled}")
