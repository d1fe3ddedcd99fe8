"""`make cuda-check` on texts as ptxas and cuobjdump write them: what it must refuse."""

import pytest

from build_tools import cuda_check, objects
from build_tools.cuda_check import WIDE, Usage, access_faults, accesses, usage, usage_faults

pytestmark = pytest.mark.usefixtures("tree")

NORM = "_ZN5oases4cuda39_GLOBAL__N__9d2069f8_7_norm_cu_c5970c0814forward_kernelI13__nv_bfloat16Li8ELi2EEEv"
GELU = "_ZN5oases4cuda11gelu_kernelI13__nv_bfloat16Li8EEEv"
LOG = f"""nvcc 13.0: nvcc -c a.cu
ptxas info    : Compiling entry function '_Z1f' for 'sm_80'
ptxas info    : Function properties for _Z1f
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 200 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '{NORM}' for 'sm_80'
ptxas info    : Function properties for {NORM}
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1f' for 'sm_90'
ptxas info    : Used 255 registers, 400 bytes cmem[0]
"""
SYMBOLS = {
    "forward_kernel": NORM,
    "gelu_kernel": GELU,
    "backward_kernel": "_ZN5oases15backward_kernelIfLi4ELi0EEEv",
    "gelu_backward_kernel": "_ZN5oases20gelu_backward_kernelI6__halfLi8EEEv",
    "swiglu_kernel": "_ZN5oases13swiglu_kernelIfLi4EEEv",
    "swiglu_backward_kernel": "_ZN5oases22swiglu_backward_kernelI6__halfLi8EEEv",
    "combine": "_ZN5oases7combineI13__nv_bfloat16S3_Li8EEEv",
    "combine_backward": "_ZN5oases16combine_backwardI6__halffLi8EEEv",
    "gather": "_ZN5oases6gatherI5uint4EEv",
    "pack": "_ZN5oases4packI5uint4EEv",
}
LOAD, STORE = "   LDG.E.128.CONSTANT R4, [R2.64] ;\n", "   STG.E.128.STRONG.SM desc[UR4][R2.64], R4 ;\n"


def function(symbol, body):
    return f"\t\tFunction : {symbol}\n{body}"


def sass(**bodies):
    """Machine code for sm_90 of all wide kernels, as they should be but for those given, and of a narrow one."""
    narrow = function(NORM.replace("Li8ELi2", "Li1ELi0"), "   STG.E.U16 [R2.64], R4 ;\n" * 8)
    parts = [function(symbol, bodies.get(name, LOAD + STORE)) for name, symbol in SYMBOLS.items()]
    return "arch = sm_90\n" + narrow + "".join(parts)


def faults(text):
    return access_faults(accesses(text), ["sm_90"])


def test_usage_is_read_from_the_log():
    assert usage(LOG) == {
        "sm_80": {"_Z1f": Usage(200, 0, 0), NORM: Usage(96, 16, 0)},
        "sm_90": {"_Z1f": Usage(255, 0, 0)},
    }


def test_registers_of_a_wide_kernel_are_limited_and_no_kernel_may_spill():
    assert usage_faults(usage(LOG)) == [], "kernels that are not wide use what they need"
    more = LOG.replace("Used 96", "Used 97")
    assert usage_faults(usage(more)) == [f"{NORM} on sm_80 uses 97 registers, at most 96 are allowed"]
    spills = LOG.replace(
        "0 bytes stack frame, 0 bytes spill stores, 0", "16 bytes stack frame, 8 bytes spill stores, 4", 1
    )
    assert usage_faults(usage(spills)) == ["_Z1f on sm_80 spills 12 bytes of registers to memory"]


def test_kernels_of_16_bytes_at_a_time_pass():
    assert faults(sass()) == []
    assert len(accesses(sass())) == len(WIDE) == len(SYMBOLS)
    assert faults(sass(pack=LOAD * 4 + "   STG.E.U8 [R2.64], R4 ;\n")) == [], "a bitmap: it stores bits"
    assert faults(sass(gelu_backward_kernel=LOAD * 3 + STORE + "   STG.E [R2.64], R4 ;\n" * 8)) == []
    assert faults(sass(gather="   LDG.E.64 R2, [R2.64] ;\n" + LOAD + STORE)) == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (LOAD + "   STG.E [R2.64], R4 ;\n" * 8, "has no store of 16 bytes"),
        (LOAD + STORE + "   STG.E [R2.64], R4 ;\n" * 7 + "   STG.E.U16 [R2.64], R4 ;\n" * 2, "has 9 stores of less"),
        (LOAD + STORE + "   LDG.E.U16 R5, [R2.64] ;\n" * 16, "has 16 loads of less"),
        (LOAD + STORE + "   STG.E.64 [R2.64], R4 ;\n" * 2, "has 2 stores of less"),
        ("   LDG.E.U16.CONSTANT R5, [R2.64] ;\n" * 8 + STORE, "has no load of 16 bytes"),
    ],
)
def test_a_split_pack_is_found(body, found):
    assert [fault for fault in faults(sass(gelu_kernel=body)) if f"{GELU} on sm_90 {found}" in fault]
    assert all(fault.startswith(GELU) for fault in faults(sass(gelu_kernel=body)))


def test_a_norm_kernel_split_as_older_compilers_did_is_found():
    body = LOAD * 10 + "   STG.E.U16 [R2.64], R4 ;\n" * 32
    assert [fault.partition(" has ")[2] for fault in faults(sass(forward_kernel=body))] == [
        "no store of 16 bytes", "32 stores of less than 16 bytes, at most 2 are allowed",
    ]  # fmt: skip


def test_kernels_that_are_missing_are_found():
    assert faults("") == [f"no kernel {name} of 16 bytes at a time on sm_90" for name in WIDE]
    without = sass().replace(SYMBOLS["combine"], "_ZN5oases7combineIfLi1EEEv")
    assert faults(without) == ["no kernel combine of 16 bytes at a time on sm_90"]


def test_the_check_prints_its_tables_and_fails_by_faults(nvcc, monkeypatch, capsys):
    def log(unit):
        unit.target.parent.mkdir(parents=True, exist_ok=True)
        unit.log.write_text(LOG)

    monkeypatch.setattr(objects.Unit, "compile", log)
    monkeypatch.setenv("OASES_CUDA_ARCHS", "90")
    tool = nvcc / "cuobjdump"
    for text, status in ((sass(), 0), (sass(gelu_kernel=LOAD), 1)):
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        tool.chmod(0o755)
        assert cuda_check.check() == status
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[1].split() == ["one.cu", "sm_80", "2", "200", "16", "0"]
    assert ["forward_kernel", "1", "(0)", "1", "(0)"] in [line.split() for line in lines]
    assert output.err.splitlines()[-1] == f"cuda-check: {GELU} on sm_90 has no store of 16 bytes"


def test_what_cannot_be_checked(nvcc, monkeypatch, capsys):
    (nvcc / "broken").touch()
    assert cuda_check.check() == 1, "a kernel that does not compile"
    (nvcc / "broken").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cuda_check.importlib.util, "find_spec", lambda name: None)
    assert cuda_check.check() == 1, "no cuobjdump"
    assert "the width of accesses is not known: cuobjdump was not found" in capsys.readouterr().err
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    assert cuda_check.check() == 0, "nothing to check without a compiler"
