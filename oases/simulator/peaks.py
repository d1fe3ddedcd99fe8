"""Peak rates of devices from vendors' data sheets, the denominator of utilisation (MFU)."""

from __future__ import annotations

import re

PEAK_FLOPS = {
    "3090": {"float32": 35.6e12, "bfloat16": 71e12, "float16": 71e12},
    "4090": {"float32": 82.6e12, "bfloat16": 165.2e12, "float16": 165.2e12},
    "a10": {"float32": 31.2e12, "bfloat16": 125e12, "float16": 125e12},
    "a100": {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
    "h100 nvl": {"float32": 60e12, "bfloat16": 835e12, "float16": 835e12},
    "h100 pcie": {"float32": 51e12, "bfloat16": 756e12, "float16": 756e12},
    "h100": {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
    "h200 nvl": {"float32": 60e12, "bfloat16": 835e12, "float16": 835e12},
    "h200": {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
    "l4": {"float32": 30.3e12, "bfloat16": 121e12, "float16": 121e12},
    "l40s": {"float32": 91.6e12, "bfloat16": 362e12, "float16": 362e12},
    "t4": {"float32": 8.1e12, "float16": 65e12},
    "v100": {"float32": 15.7e12, "float16": 125e12},
}
"""Dense matmul FLOP/s by dtype; fp32 without TF32, half precision with fp32 accumulation. More specific names come
first.
"""


def peak_flops(device: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device whose name contains the words of a known one; None if unknown."""
    words = set(re.findall(r"\w+", device.lower()))
    for name, rates in PEAK_FLOPS.items():
        if words.issuperset(name.split()):
            return rates.get(dtype)
    return None
