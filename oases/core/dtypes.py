"""Communication dtypes: names, and bytes per number that is sent."""

QUANTISED = "int8"
"""The dtype of quantised numbers, which have an fp32 scale per block (csrc/quantize_kernels.h)."""
QUANTISED_BLOCK = 128
WIRE_BYTES = {"bfloat16": 2.0, "float16": 2.0, QUANTISED: 1 + 1 / 32}
"""Bytes per number that is sent; quantised ones with their part of a block's scale."""
WIRES = ("none", *WIRE_BYTES)
"""Dtypes in which activations may be summed over tensor-parallel ranks; none: the model's own."""
AUTO_LOSSY = "auto:lossy"
"""wire_dtype of a stack that measures its own type and `LOSSY` in its first steps."""
LOSSY = ("bfloat16", QUANTISED)
"""Wires that a search which may round sums tries."""
