"""The descriptors by which Hopper's tensor memory accelerator (TMA) moves a tensor in boxes."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def boxes(made: Tensor, *box: int) -> TensorDescriptor:
    """Descriptor of `made` in boxes of these sizes, in the shared memory layout of products; reads 0 outside of `made`.

    The last axis is contiguous, the other strides are multiples of 16 bytes, except along an axis of size 1.
    """
    grain = 16 // made.element_size()
    legal = -(-made.shape[-1] // grain) * grain
    strides = [stride if size > 1 else legal for size, stride in zip(made.shape[:-1], made.stride()[:-1], strict=True)]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * made.element_size(), rank=made.dim())
    return TensorDescriptor(made, list(made.shape), [*strides, 1], list(box), layout)
