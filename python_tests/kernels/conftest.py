import os

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("OASES_TEST_VIRTUAL"):  # in a process of its own: the device is that of every test
    DEVICES = ["virtual"]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Every test of a kernel runs on the CPU, and on a GPU by `make test-gpu`."""
    if request.param == "virtual":
        import device as virtual

        virtual.build()
        virtual.loaded()
    return request.param


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A source tree with one kernel, and none of the variables that a build asks for."""
    from build_tools import objects  # which tests of an installed oases do not have

    for name in ("NVCC", "OASES_CUDA", "OASES_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CUOBJDUMP"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cu").write_text("// a kernel\n")
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    monkeypatch.setattr(objects, "BUILD", tmp_path / "build")


@pytest.fixture
def nvcc(tree, monkeypatch, tmp_path):
    """A compiler that counts its compilations in the file `compiled` and fails where there is a file `broken`."""
    (tmp_path / "libcudart_static.a").touch()
    path = tmp_path / "nvcc"
    path.write_text(f"""#!/bin/sh
cd {tmp_path}
case "$1" in
--version) echo "Cuda compilation tools, release 12.4, V12.4.1";;
--list-gpu-arch) printf 'compute_70\\ncompute_80\\ncompute_90\\n';;
-E) ;;
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
