"""Peak rates of devices from vendors' data sheets, of which utilisation is a share."""

from __future__ import annotations

import re

PEAK_FLOPS = {
    "3090": {"float32": 35.6e12, "bfloat16": 71e12, "float16": 71e12},
    "4090": {"float32": 82.6e12, "bfloat16": 165.2e12, "float16": 165.2e12},
    "a10": {"float32": 31.2e12, "bfloat16": 125e12, "float16": 125e12},
    "a100": {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
    "l4": {"float32": 30.3e12, "bfloat16": 121e12, "float16": 121e12},
    "t4": {"float32": 8.1e12, "float16": 65e12},
}
"""Dense products, FLOP/s by dtype, fp32 without TF32; half precision summed in fp32."""


def peak_flops(device: str, dtype: str) -> float | None:
    """FLOP/s of a device whose name holds one of the known ones as a word; None where it is not known."""
    words = set(re.findall(r"\w+", device.lower()))
    for name, rates in PEAK_FLOPS.items():
        if name in words:
            return rates.get(dtype)
    return None
