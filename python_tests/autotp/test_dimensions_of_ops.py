"""The op table beside the ops themselves: half of an input gives the half of the result that the table names."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import fx

from oases.autotp.op_table import follow
from oases.autotp.shapes import Split

A = torch.ops.aten
CALLS = {
    "add": lambda x: (A.add.Tensor, x, torch.randn(4, 1, 8)),
    "transpose": lambda x: (A.transpose.int, x, 0, -1),
    "permute": lambda x: (A.permute.default, x, [2, 0, 1]),
    "movedim": lambda x: (A.movedim.intlist, x, [0, 1], [2, 0]),
    "movedim back": lambda x: (A.movedim.int, x, -1, 0),
    "numpy_T": lambda x: (A.numpy_T.default, x),
    "mT": lambda x: (A.mT.default, x),
    "unsqueeze": lambda x: (A.unsqueeze.default, x, -2),
    "squeeze": lambda x: (A.squeeze.dim, x[:, :1], 1),
    "squeeze all": lambda x: (A.squeeze.default, x[:, :, None]),
    "stack": lambda x: (A.stack.default, [x, torch.randn(x.shape)], 1),
    "repeat": lambda x: (A.repeat.default, x, [2, 1, 1, 3]),
    "repeat_interleave": lambda x: (A.repeat_interleave.self_int, x, 2, 1),
    "select": lambda x: (A.select.int, x, 1, 2),
    "slice": lambda x: (A.slice.Tensor, x, -1, 2, 4),
    "narrow": lambda x: (A.narrow.default, x, 1, 0, 2),
    "unbind": lambda x: (A.unbind.int, x, 1),
    "split": lambda x: (A.split.Tensor, x, 2, 2),
    "chunk": lambda x: (A.chunk.default, x, 2),
    "flip": lambda x: (A.flip.default, x, [0]),
    "roll": lambda x: (A.roll.default, x, [1, 2], [0, 2]),
    "roll all": lambda x: (A.roll.default, x, [1]),
    "cat": lambda x: (A.cat.default, [x, torch.randn(4, 3, 8)], 1),
    "slice_scatter": lambda x: (A.slice_scatter.default, x, torch.randn(4, 2, 8), 1, 0, 2),
    "select_scatter": lambda x: (A.select_scatter.default, x, torch.randn(4, 8), 1, 0),
    "sum": lambda x: (A.sum.dim_IntList, x, [0]),
    "mean": lambda x: (A.mean.dim, x, [-1, 0], True),
    "max": lambda x: (A.max.dim, x, 1),
    "maximum": lambda x: (A.max.other, x, torch.randn(8)),
    "var_mean": lambda x: (A.var_mean.correction, x, [1]),
    "softmax": lambda x: (A.softmax.int, x, -1),
    "cumsum": lambda x: (A.cumsum.default, x, 1),
    "sort": lambda x: (A.sort.default, x),
    "topk": lambda x: (A.topk.default, x, 2, 1),
    "norm": lambda x: (A.linalg_vector_norm.default, x, 2, [0]),
    "fft": lambda x: (A.fft_fft.default, x),
    "layer_norm": lambda x: (A.layer_norm.default, x, [8], torch.randn(8)),
    "fused norm": lambda x: (A._fused_rms_norm.default, x, [8], torch.randn(8), 1e-6),
    "tril": lambda x: (A.tril.default, x),
    "pad": lambda x: (A.constant_pad_nd.default, x, [1, 1]),
    "linear": lambda x: (A.linear.default, x, torch.randn(3, 8), torch.randn(3)),
    "matmul": lambda x: (A.matmul.default, x, torch.randn(8, 5)),
    "matmul of a vector": lambda x: (A.matmul.default, x, torch.randn(8)),
    "matmul with more": lambda x: (A.matmul.default, torch.randn(2, 1, 5, 6), x),
    "bmm": lambda x: (A.bmm.default, x, torch.randn(4, 8, 5)),
    "baddbmm": lambda x: (A.baddbmm.default, torch.randn(6, 5), x, torch.randn(4, 8, 5)),
    "einsum": lambda x: (A.einsum.default, "abc,dcb->da", [x, torch.randn(5, 8, 6)]),
    "solve": lambda x: (A.linalg_solve_triangular.default, torch.eye(6) + torch.ones(6, 6).triu(1), x),
    "attention": lambda x: (
        A.scaled_dot_product_attention.default,
        x[:, None],
        torch.randn(4, 1, 3, 8),
        x[:, None, :3],
    ),
    "complex": lambda x: (A.view_as_complex.default, x.unflatten(-1, (4, 2))),
    "real": lambda x: (A.view_as_real.default, x + 0j),
    "expand": lambda x: (A.expand.default, x, [3, -1, -1, -1]),
}
KWARGS = {"solve": {"upper": True}}


def called(name):
    """A node of the call, its tensors by node, and a function of such that returns the results."""
    target, *args = CALLS[name](torch.randn(4, 6, 8))
    graph, values, kwargs = fx.Graph(), {}, KWARGS.get(name, {})

    def placeholder(tensor):
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = values[node] = tensor
        return node

    node = graph.call_function(target, tuple(pytree.tree_map_only(torch.Tensor, placeholder, args)), kwargs)

    def results(given):
        found = target(*fx.map_arg(node.args, given.__getitem__), **kwargs)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    whole = results(values)
    node.meta["val"] = whole if len(whole) > 1 else whole[0]
    return node, values, results


@pytest.mark.parametrize("name", CALLS)
def test_rows_tell_where_a_dimension_goes(name):
    torch.manual_seed(0)
    node, values, results = called(name)
    whole, followed = results(values), 0
    for x, tensor in values.items():
        for dim, length in enumerate(tensor.shape):
            path = follow(node, {x: Split(dim, (length,))})
            assert path.why != "unknown" or length == 1
            if path.why or length == 1:
                continue
            followed += 1
            cut = {x: dim, **{other: at for other, at in path.beside.items() if at is not None}}
            halves = results(
                {each: t.narrow(cut[each], 0, length // 2) if each in cut else t for each, t in values.items()}
            )
            for split, half, all_of_it in zip(path.results, halves, whole, strict=True):
                torch.testing.assert_close(half, all_of_it.narrow(split.dim, 0, length // 2))
    assert followed or name == "roll all"
