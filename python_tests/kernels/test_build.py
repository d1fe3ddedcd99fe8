"""Build of the CUDA kernels, or without them, with a shell script as nvcc; and the build information."""

import os
import re
from pathlib import Path

import pytest
import torch

import oases
from build_tools import cuda_build, objects
from oases import cli
from oases.errors import ExtensionError
from oases.extension import build_info, build_text, check_torch


@pytest.fixture(autouse=True)
def _tree(monkeypatch, tmp_path):
    """A source tree with one kernel."""
    for name in ("NVCC", "OASES_CUDA", "OASES_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CUOBJDUMP"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cu").write_text("// a kernel\n")
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    monkeypatch.setattr(objects, "BUILD", tmp_path / "build")


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


def compile_kernels():
    units = cuda_build.kernel_units(cuda_build.wanted_toolkit(True))
    objects.compile_units(units)
    return units


def test_kernels_are_compiled_once(nvcc, monkeypatch):
    (unit,) = compile_kernels()
    assert unit.target == nvcc / "build" / "cuda" / "80-90" / "one.o"
    assert f"-L{nvcc}" in cuda_build.find_toolkit().link_arguments()
    compile_kernels()
    assert compilations(nvcc) == 1
    log = unit.log.read_text()
    assert "compute_80,code=sm_80" in log
    assert "compute_90,code=compute_90" in log, "the last architecture is kept as PTX"
    assert "compute_70" not in log, "known to this nvcc, but not on the list"
    monkeypatch.setenv("OASES_CUDA_ARCHS", "90")
    (other,) = compile_kernels()
    assert compilations(nvcc) == 2, "other architectures, other objects"
    assert "sm_80" not in other.log.read_text()
    os.utime(nvcc / "csrc" / "one.cu", (2e9, 2e9))
    compile_kernels()
    assert compilations(nvcc) == 3, "the source is newer"


def test_an_architecture_that_nvcc_does_not_know(nvcc, monkeypatch):
    monkeypatch.setenv("OASES_CUDA_ARCHS", "80,120")
    with pytest.raises(cuda_build.NoCudaError, match=r"'120'.* knows 70, 80, 90"):
        cuda_build.find_toolkit()


def test_architectures_asked_of_torch_are_honoured(nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert cuda_build.find_toolkit().architectures == ("80", "90")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert cuda_build.find_toolkit().architectures == ("90",)
    monkeypatch.setenv("OASES_CUDA_ARCHS", "80")
    assert cuda_build.find_toolkit().architectures == ("80",), "the project's own goes before torch's"
    monkeypatch.delenv("OASES_CUDA_ARCHS")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(cuda_build.NoCudaError, match=r"TORCH_CUDA_ARCH_LIST names 'Hopper'.* knows 70, 80, 90"):
        cuda_build.find_toolkit()


def test_nvcc_of_the_wheel_is_found(nvcc, monkeypatch):
    folder = nvcc / "site" / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (nvcc / "nvcc").rename(folder / "nvcc")
    monkeypatch.delenv("NVCC")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.syspath_prepend(str(nvcc / "site"))
    if not os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        assert cuda_build.find_toolkit().nvcc == str(folder / "nvcc")


def test_without_nvcc_one_line_says_why(monkeypatch, capsys):
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    message = "/nowhere/nvcc was not found; install the CUDA toolkit or set NVCC"
    assert cuda_build.wanted_toolkit(True) is None
    error = capsys.readouterr().err
    assert error.startswith(f"oases: building without CUDA kernels: {message}")
    assert error.count("\n") == 1
    monkeypatch.setenv("OASES_CUDA", "1")
    with pytest.raises(SystemExit, match=f"OASES_CUDA=1, but {message}"):
        cuda_build.wanted_toolkit(True)
    monkeypatch.setenv("OASES_CUDA", "0")
    assert cuda_build.wanted_toolkit(True) is None
    assert capsys.readouterr().err == ""
    assert cuda_build.check() == 0, "nothing to check without a compiler"


def test_a_kernel_that_does_not_compile(nvcc, monkeypatch, capsys):
    (nvcc / "broken").touch()
    with pytest.raises(objects.CompileError, match=r"nvcc failed on csrc/one\.cu: .*error: no such thing") as caught:
        compile_kernels()
    assert caught.value.unit.source.name == "one.cu"
    cuda_build.leave_out(caught.value)
    assert "building without CUDA kernels: nvcc failed on csrc/one.cu" in capsys.readouterr().err
    monkeypatch.setenv("OASES_CUDA", "1")
    with pytest.raises(SystemExit, match="OASES_CUDA=1, but nvcc failed on"):
        cuda_build.leave_out(caught.value)
    assert cuda_build.check() == 1, "a kernel that does not compile is an error of the check"


def test_oases_cuda_is_0_or_1(monkeypatch):
    monkeypatch.setenv("OASES_CUDA", "yes")
    with pytest.raises(SystemExit, match="OASES_CUDA must be 0 or 1, got 'yes'"):
        cuda_build.wanted_toolkit(True)


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


def test_usage_is_read_from_the_log():
    assert cuda_build.usage(LOG) == {
        "sm_80": cuda_build.Usage(kernels=2, registers=32, stack=16, spills=12),
        "sm_90": cuda_build.Usage(kernels=1, registers=255),
    }


def test_a_norm_kernel_that_spills_fails_the_check(nvcc, capsys, monkeypatch):
    monkeypatch.setattr(objects.Unit, "compile", lambda unit: unit.log.write_text(LOG))
    monkeypatch.setattr(cuda_build, "narrow_kernels", lambda sass: ([], 0))
    (nvcc / "build" / "cuda" / "80-90").mkdir(parents=True)
    (nvcc / "cuobjdump").write_text("#!/bin/sh\n")
    (nvcc / "cuobjdump").chmod(0o755)
    for before, stem, status in (("one", "sort", 0), ("sort", "norm", 1)):
        (nvcc / "csrc" / f"{before}.cu").rename(nvcc / "csrc" / f"{stem}.cu")
        assert cuda_build.check() == status
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split() == ["sort.cu", "sm_80", "2", "32", "16", "12"]
    assert "registers spill to memory in norm.cu on sm_80" in output.err


SASS = """
arch = sm_80
\t\tFunction : _ZN5oases4cuda14forward_kernelI13__nv_bfloat16Li8ELi2EEEv
   LDG.E.128 R4, [R2.64] ;
   STG.E.128.STRONG.SM [R2.64], R4 ;
\t\tFunction : _ZN5oases4cuda14forward_kernelI13__nv_bfloat16Li1ELi0EEEv
   STG.E.U16 [R2.64], R4 ;
\t\tFunction : _ZN5oases4cuda4packI5uint4EEv
   LDG.E.128.CONSTANT R4, [R2.64] ;
   STG.E.U8 [R2.64], R4 ;
arch = sm_90
\t\tFunction : _ZN5oases4cuda14forward_kernelI13__nv_bfloat16Li8ELi2EEEv
   LDG.E.128 R4, [R2.64] ;
   STG.E.U16 [R2.64], R4 ;
"""


def test_a_wide_kernel_with_narrow_stores_fails_the_check(nvcc, capsys):
    narrow = "_ZN5oases4cuda14forward_kernelI13__nv_bfloat16Li8ELi2EEEv on sm_90"
    assert cuda_build.narrow_kernels(SASS) == ([narrow], 3)
    assert cuda_build.narrow_kernels(SASS.replace("STG.E.128.STRONG.SM", "STG.E.U16"))[0][0].endswith("sm_80")
    tool = nvcc / "cuobjdump"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{SASS}END\n")
    tool.chmod(0o755)
    assert cuda_build.check() == 1
    output = capsys.readouterr()
    assert "2 of 3 wide kernels load and store 16 bytes at a time" in output.out
    assert f"no access of 16 bytes in {narrow}" in output.err


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
    assert cuda_build.find_toolkit(cuda_build.LINK_ONLY).architectures == ("90",)
    monkeypatch.setenv("OASES_CUDA_ARCHS", "all")
    assert cuda_build.find_toolkit(cuda_build.LINK_ONLY).architectures == ("80", "90")


def test_another_torch_is_refused_in_a_sentence(tmp_path):
    extension = tmp_path / "_C.so"
    extension.write_bytes(b"\x7fELF..oases was built against torch 2.13.0+cpu\0..")
    check_torch(extension, "2.13.1+cu130")
    for other in ("2.12.1+cpu", "2.14.0", "3.13.0", "2.1.3"):
        with pytest.raises(
            ExtensionError, match=rf"built against torch 2\.13\.0\+cpu, but torch {re.escape(other)} is"
        ):
            check_torch(extension, other)
    extension.write_bytes(b"\x7fELF")
    with pytest.raises(ExtensionError, match="does not say which torch"):
        check_torch(extension, "2.13.0")
    check_torch(Path(oases._C.__file__), torch.__version__)
