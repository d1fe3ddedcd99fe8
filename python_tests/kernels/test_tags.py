"""CUDA graphs of torch.compile leave out ops that start collectives or wait for the device (csrc/dispatch.h)."""

import torch

import oases.layers.weight_gradient  # noqa: F401  (registers ops)

COLLECTIVES = {"column_linear", "column_linear_backward", "row_linear", "row_linear_backward"}
DEFERRED = {"deferred_linear", "deferred_linear_backward", "deferred_linear_backward_kept"}
"""Their weight gradients are noted by the host in every call, which a replay would not do."""
SIZES_FROM_THE_DEVICE = {"bitmap_unpack", "histogram", "permute"}
CAPTURED = {
    "bias_dropout_residual_norm", "bias_dropout_residual_norm_backward", "bias_gelu", "bias_gelu_backward", "swiglu",
    "swiglu_backward", "unpermute", "unpermute_backward", "bitmap_pack", "sketch_encode", "sketch_decode",
    "quantize", "dequantize", "dequantize_sum",
    "experts",  # a placeholder in graphs, never run
}  # fmt: skip


def test_ops_that_a_replayed_graph_would_not_run_are_left_out_of_it():
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("oases::")}
    ops = {name: getattr(torch.ops.oases, name).default for name in names}
    tagged = {name for name, op in ops.items() if torch.Tag.cudagraph_unsafe in op.tags}
    assert tagged == COLLECTIVES | DEFERRED | SIZES_FROM_THE_DEVICE
    assert names - tagged <= CAPTURED, "a new op: does it start collectives, or wait for the device?"
