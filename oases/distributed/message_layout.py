"""Layout of a message between pipeline stages: its tensors as bytes, in parts, of quantised numbers where asked for.

Quantised numbers have 8 bits each and an fp32 scale per block of 128, so a number is off by half a step of its block
at most; a block with a NaN or an infinity arrives as NaN. Tensors of fewer numbers than a
block are sent as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oases.extension import QUANTIZED_BLOCK, quantized_bytes
from oases.kernels.quantized import dequantize, quantize

Form = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and types of the tensors of a message."""

QUANTISABLE = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED = 16
"""Bytes that tensors packed into one message are aligned to."""


@dataclass(frozen=True)
class Layout:
    """Layout of the messages of a lane. parts: of equal sizes, each sent by one rank. quantised: whether tensors
    of a block of numbers or more are.
    """

    form: Form
    parts: int = 1
    quantised: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether the message is sent as bytes: several tensors, quantised ones, or one that does not divide."""
        return (
            len(self.form) > 1
            or self.quantises(self.form[0][0], self.form[0][1])
            or math.prod(self.form[0][0]) % self.parts > 0
        )

    @property
    def part(self) -> tuple[int, torch.dtype]:
        """Number and type of the elements of one part."""
        if not self.is_packed:
            shape, dtype = self.form[0]
            return math.prod(shape) // self.parts, dtype
        return -(-self._places()[1] // (self.parts * _ALIGNED)) * _ALIGNED, torch.uint8

    @property
    def part_bytes(self) -> int:
        """Bytes of one part."""
        size, dtype = self.part
        return size * dtype.itemsize

    @property
    def saved_bytes(self) -> int:
        """Bytes of one part that quantisation saves."""
        return Layout(self.form, self.parts).part_bytes - self.part_bytes

    def quantises(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a tensor of the message is sent quantised."""
        return self.quantised and dtype in QUANTISABLE and math.prod(shape) >= QUANTIZED_BLOCK

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The whole message, flat: all parts, padded where packed. Tensors are read alone."""
        if not self.is_packed:
            return tensors[0].contiguous().view(-1)
        packed = tensors[0].new_zeros(self.parts * self.part[0], dtype=torch.uint8)
        for tensor, (start, end) in zip(tensors, self._places()[0], strict=True):
            flat, room = tensor.contiguous().view(-1), packed[start:end]
            if self.quantises(tensor.shape, tensor.dtype):
                room.copy_(quantize(flat.float()))
            else:
                room.view(tensor.dtype).copy_(flat)
        return packed

    def unpack(self, whole: Tensor) -> list[Tensor]:
        """Tensors of a whole message, those sent as they are as views of its memory."""
        if not self.is_packed:
            return [whole.view(self.form[0][0])]
        found = []
        for (shape, dtype), (start, end) in zip(self.form, self._places()[0], strict=True):
            room = whole[start:end]
            if self.quantises(shape, dtype):
                found.append(dequantize(room, math.prod(shape)).to(dtype).view(shape))
            else:
                found.append(room.view(dtype).view(shape))
        return found

    def _places(self) -> tuple[list[tuple[int, int]], int]:
        """First and last byte of each tensor in a packed message, and its size."""
        places, end = [], 0
        for shape, dtype in self.form:
            many = math.prod(shape)
            size = quantized_bytes(many) if self.quantises(shape, dtype) else many * dtype.itemsize
            places.append((end, end + size))
            end = -(-(end + size) // _ALIGNED) * _ALIGNED
        return places, end


def form_text(form: Form) -> str:
    """A form for messages: "(4, 8) torch.float32, ..."."""
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in form) or "nothing"
