"""Build of the CUDA kernels, or without them, with a shell script as nvcc; and the build information."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import oases
from oases import cli
from oases.reporting import build_info, build_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda_build(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("cuda_build", ROOT / "csrc" / "cuda_build.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cuda_build", module)
    spec.loader.exec_module(module)
    for name in ("NVCC", "OASES_CUDA", "OASES_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cu").write_text("// a kernel\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    return module


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """A compiler that counts its compilations in the file `compiled` and fails where there is a file `broken`."""
    (tmp_path / "libcudart_static.a").touch()
    path = tmp_path / "nvcc"
    path.write_text(f"""#!/bin/sh
cd {tmp_path}
case "$1" in
--version) echo "Cuda compilation tools, release 12.4, V12.4.1";;
--list-gpu-arch) printf 'compute_70\\ncompute_80\\ncompute_90\\n';;
-dryrun) echo '#$ LIBRARIES=  "-L{tmp_path}"';;
*)
  echo x >> compiled
  test ! -e broken || {{ echo "csrc/one.cu(1): error: no such thing" >&2; exit 1; }}
  echo 'ptxas info    : Compiling entry function 'f' for 'sm_90'' >&2
  while [ "$1" != -o ]; do shift; done
  echo "$2 : csrc/one.cu" > "${{2%.o}}.d"
  touch "$2";;
esac
""")
    path.chmod(0o755)
    monkeypatch.setenv("NVCC", str(path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compilations(folder):
    return len((folder / "compiled").read_text().splitlines())


def test_kernels_are_compiled_once(cuda_build, nvcc, monkeypatch):
    objects, link = cuda_build.cuda_part(True)
    assert objects == [str(nvcc / "build" / "80-90" / "one.o")]
    assert f"-L{nvcc}" in link
    assert cuda_build.cuda_part(True) is not None
    assert compilations(nvcc) == 1
    log = (nvcc / "build" / "80-90" / "one.log").read_text()
    assert "compute_80,code=sm_80" in log
    assert "compute_90,code=compute_90" in log, "the last architecture is kept as PTX"
    assert "compute_70" not in log, "known to this nvcc, but not on the list"
    monkeypatch.setenv("OASES_CUDA_ARCHS", "90")
    cuda_build.cuda_part(True)
    assert compilations(nvcc) == 2, "other architectures, other objects"
    assert "sm_80" not in (nvcc / "build" / "90" / "one.log").read_text()


def test_an_architecture_that_nvcc_does_not_know(cuda_build, nvcc, monkeypatch):
    monkeypatch.setenv("OASES_CUDA_ARCHS", "80,120")
    with pytest.raises(cuda_build.NoCudaError, match=r"'120'.* knows 70, 80, 90"):
        cuda_build.find_toolkit()


@pytest.mark.parametrize("why", ["missing", "broken"])
def test_without_cuda_one_line_says_why(cuda_build, nvcc, monkeypatch, capsys, why):
    if why == "missing":
        monkeypatch.setenv("NVCC", "/nowhere/nvcc")
        message = "/nowhere/nvcc was not found; install the CUDA toolkit or set NVCC"
    else:
        (nvcc / "broken").touch()
        message = "nvcc failed on csrc/one.cu: csrc/one.cu(1): error: no such thing"
    assert cuda_build.cuda_part(True) is None
    error = capsys.readouterr().err
    assert error.startswith(f"oases: building without CUDA kernels: {message}")
    assert error.count("\n") == 1
    monkeypatch.setenv("OASES_CUDA", "1")
    with pytest.raises(SystemExit, match="OASES_CUDA=1, but") as caught:
        cuda_build.cuda_part(True)
    assert message in str(caught.value)
    monkeypatch.setenv("OASES_CUDA", "0")
    assert cuda_build.cuda_part(True) is None
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("OASES_CUDA")
    # A check has nothing to check without a compiler, but a kernel that does not compile is an error.
    assert cuda_build.check() == (0 if why == "missing" else 1)


def test_oases_cuda_is_0_or_1(cuda_build, monkeypatch):
    monkeypatch.setenv("OASES_CUDA", "yes")
    with pytest.raises(SystemExit, match="OASES_CUDA must be 0 or 1, got 'yes'"):
        cuda_build.cuda_part(True)


LOG = """nvcc 13.0: nvcc -c a.cu
ptxas info    : Compiling entry function '_Z1f' for 'sm_80'
ptxas info    : Function properties for _Z1f
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1g' for 'sm_80'
ptxas info    : Function properties for _Z1g
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 30 registers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1f' for 'sm_90'
ptxas info    : Used 255 registers, 400 bytes cmem[0]
"""


def test_usage_is_read_from_the_log(cuda_build):
    assert cuda_build.usage(LOG) == {
        "sm_80": cuda_build.Usage(kernels=2, registers=32, stack=16, spills=12),
        "sm_90": cuda_build.Usage(kernels=1, registers=255),
    }


def test_a_norm_kernel_that_spills_fails_the_check(cuda_build, nvcc, capsys, monkeypatch):
    for stem, status in (("sort", 0), ("norm", 1)):
        target = nvcc / "build" / f"{stem}.o"
        target.parent.mkdir(exist_ok=True)
        target.with_suffix(".log").write_text(LOG)
        monkeypatch.setattr(cuda_build, "compile_kernels", lambda toolkit, target=target: [target])
        assert cuda_build.check() == status
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split() == ["sort.cu", "sm_80", "2", "32", "16", "12"]
    assert "registers spill to memory in norm.cu on sm_80" in output.err


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


def test_a_torch_without_cuda_needs_one_architecture_to_link(cuda_build, nvcc, monkeypatch):
    assert cuda_build.find_toolkit(cuda_build.LINK_ONLY).architectures == ("90",)
    monkeypatch.setenv("OASES_CUDA_ARCHS", "all")
    assert cuda_build.find_toolkit(cuda_build.LINK_ONLY).architectures == ("80", "90")
