"""Communication dtypes: names, and bytes per number that is sent."""

CODES = ("int8", "fp8", "int4")
"""Codes of quantised numbers; fp8 is e4m3."""
QUANTISED = {
    f"{code}{options}": code
    for options in ("", ":rotated", ":stochastic", ":rotated:stochastic")
    for code in CODES
    if not (code == "fp8" and "rotated" in options)
}
"""Code of each quantised wire type; rotated and stochastic: see csrc/quantize_kernels.h."""
_CODE_BYTES = {"int8": 1 + 1 / 32, "fp8": 1 + 1 / 32, "int4": 0.5 + 1 / 32}
WIRE_BYTES = {"bfloat16": 2.0, "float16": 2.0} | {name: _CODE_BYTES[code] for name, code in QUANTISED.items()}
"""Bytes per number that is sent; quantised ones with their part of a block's scale."""
WIRES = ("none", *WIRE_BYTES)
"""Dtypes in which activations may be summed over tensor-parallel ranks; none: the model's own."""
AUTO_LOSSY = "auto:lossy"
"""wire_dtype of a stack that measures its own type and `LOSSY` in its first steps."""
LOSSY = ("bfloat16", "int8")
"""Wires that a search which may round sums tries; fp8 has int8's bytes and larger errors, int4 has to be named."""
