"""The report of one GPU; measuring needs one."""

from typing import Any

import pytest

from oases_bench import gpu


def result() -> dict[str, Any]:
    part = {"seconds": 1e-3, "bytes_per_second": 3e12, "of_copy": 0.9}
    host = {"host_seconds_per_op": 4e-5, "gpu_seconds_per_op": 9e-5, "busy": 0.97}
    row = {"step_seconds": 0.1, "hidden": None, "of_ideal": 1.0}
    schedules = {"sync": row, "oases": row | {"hidden": 0.96}}
    return {
        "machine": {"gpu": "some"}, "copy_bytes_per_second": 3.3e12,
        **dict.fromkeys(gpu.KERNELS, part), "norm epilogue": part | {"over_eager": 2.5},
        **{f"host beside GPU, sequence {each}": host for each in gpu.SEQUENCES},
        "product cut in two": {"of_whole": 0.98, "flops": 7e14},
        **{
            f"{model}, communication = {ratio} x compute": {"schedules": schedules}
            for model in gpu.GPTS for ratio in gpu.RATIOS
        },
    }  # fmt: skip


def test_markdown() -> None:
    text = gpu.markdown(result())
    assert text.startswith("# One GPU, 20")
    assert "0.90 of the copy, 2.50 x torch's own ops" in text
    assert "| bias + GELU | 3000 GB/s | 0.90 of the copy |" in text
    assert "| host per op, hidden 4096, sequence 2048 | 40 us | GPU 90 us per op, busy 0.97 of the step |" in text
    assert "| GPT 1.3B, communication = 0.5 x compute: oases | 100.0 ms | hidden 0.96, 1.00 of the ideal |" in text


def test_the_gpu_is_busy_once_while_kernels_of_two_streams_run_and_not_while_one_waits() -> None:
    kernels = [("gemm", 0.0, 4e6), ("watch_clock", 1e6, 9e6), ("norm", 3e6, 6e6), ("gelu", 4e6, 5e6)]
    kernels.append(("add", 8e6, 9e6))
    assert gpu.busy_seconds(kernels) == 7
    assert gpu.busy_seconds([]) == 0


@pytest.mark.gpu
def test_overlap_with_a_simulated_link() -> None:
    """The schedules compute the same under it; how much is hidden is for the benchmark to say."""
    rows = gpu.hidden("GPT 1.3B", 1.0)["schedules"]
    assert set(rows) == {"sync", "oases@2", "oases", "auto"}
    assert all(row["max_relative_gradient_error"] < 0.05 for row in rows.values()), "bfloat16, other order of sums"
