"""Weights of which two in every four neighbouring columns are kept (2:4): their compressed form, and products with it.

Legend: M rows of x, N output features, K input features; a group is four neighbouring columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import MachineError, SpecError
from hone.ops.dispatch import backend_of, say_once
from hone.ops.linear.shapes import sparse_shape

RUN = 64
"""Groups of a row whose masks lie together: byte j of a run has the mask of group j in its low half, of j + 32 in its high one."""

_CHUNK = 1024
"""Rows whose masks are computed at a time."""


@dataclass(frozen=True)
class Sparse24:
    """A 2:4 sparse weight [N, K], compressed to nine sixteenths of its bytes (ten sixteenths with `library`)."""

    values: Tensor
    """[N, K/2]: the two kept values of each group, in the order of their columns; a view of `library`'s memory if there is one."""
    masks: Tensor | None
    """uint8 [N, K/8]: four bits a group, of which the two at the kept columns are 1; see `RUN`. None: `values` are not in that order."""
    library: Tensor | None = None
    """torch's semi-structured tensor, on a GPU: its product is the faster one where x has many rows."""

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((len(self.values), 2 * self.values.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        masks = 0 if self.masks is None else self.masks.nbytes
        return masks + (self.values.nbytes if self.library is None else self.values.nbytes * 9 // 8)

    def dense(self) -> Tensor:
        """The weight [N, K]."""
        if self.masks is None:
            assert self.library is not None
            return self.library.to_dense()
        return unpack_24(self.values, self.masks)


def is_24(weight: Tensor) -> bool:
    """Whether `weight` [N, K] has at most two non-zeros in every group."""
    return weight.dim() == 2 and weight.shape[1] % 4 == 0 and _crowded(weight) is None


def compress_24(weight: Tensor) -> Sparse24:
    """A weight [N, K] with at most two non-zeros in every four columns of a row, in the form that `sparse_linear` takes.

    Raises SpecError naming the first row with more than two of four, MachineError where the GPU does not support it.
    """
    if weight.dim() != 2 or weight.shape[1] % 8:
        raise SpecError(
            f"weight has shape {tuple(weight.shape)}; 2:4 needs two axes and columns in multiples of 8",
            fix="give [N, K], K a multiple of 8",
        )
    place = _crowded(weight)
    if place is not None:
        row, four = place
        raise SpecError(
            f"weight is not 2:4: row {row} keeps more than two of columns {4 * four} to {4 * four + 3}",
            fix="prune it to two of every four columns first, the largest magnitudes for instance",
        )
    if not weight.is_cuda:
        return Sparse24(*pack_24(weight))
    problem = library_problem(weight)
    if problem is not None:
        raise MachineError(
            problem, fix="cast it to bfloat16 or float16 and pad its axes, or keep it dense and call linear"
        )
    library = torch.sparse.to_sparse_semi_structured(weight)
    values = library.packed.flatten()[: weight.numel() // 2].view(len(weight), -1)
    masks = masks_of(weight, values)
    if masks is None:
        say_once(
            "products of few rows with 2:4 weights run in torch's kernel: this version stores the kept values in another order"
        )
    return Sparse24(values, masks, library)


def library_problem(weight: Tensor) -> str | None:
    """Why torch's semi-structured form on a GPU cannot hold `weight` [N, K]; None where it can."""
    capability = torch.cuda.get_device_capability(weight.device) if weight.is_cuda else (8, 0)
    if capability < (8, 0):
        return f"a GPU of compute capability {capability[0]}.{capability[1]} has no 2:4 products: 8.0 is the first that has"
    if weight.dtype in (torch.bfloat16, torch.float16) and len(weight) % 32 == 0 and weight.shape[1] % 64 == 0:
        return None
    return f"weight is {weight.dtype} {tuple(weight.shape)}; a GPU's 2:4 form needs 16 bits, rows in multiples of 32, columns of 64"


def pack_24(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values, masks) of a 2:4 weight [N, K], see `Sparse24`; in a group with fewer than two non-zeros, its first zeros are kept."""
    groups = weight.unflatten(1, (-1, 4))
    kept = (groups == 0).to(torch.uint8).argsort(dim=-1, stable=True)[..., :2].sort(-1).values
    bits = (1 << kept).sum(-1, dtype=torch.uint8)
    return groups.gather(-1, kept).flatten(1), _joined(bits)


def unpack_24(values: Tensor, masks: Tensor) -> Tensor:
    """The weight [N, K] of the values and masks of `Sparse24`."""
    bits = _split(masks)
    first, second = values.unflatten(1, (-1, 2)).unbind(-1)
    kept = [(bits & 1 << place) != 0 for place in range(4)]
    nothing = torch.zeros_like(first)
    columns = (
        torch.where(kept[0], first, nothing),
        torch.where(kept[1], torch.where(kept[0], second, first), nothing),
        torch.where(kept[2], torch.where(kept[3], first, second), nothing),
        torch.where(kept[3], second, nothing),
    )
    return torch.stack(columns, -1).flatten(1)


def masks_of(weight: Tensor, values: Tensor) -> Tensor | None:
    """The masks with which `unpack_24(values, masks)` is `weight` [N, K]; None where there are none.

    A library may keep any two columns of a group that cover its non-zeros: the masks follow from what it kept.
    """
    parts = []
    for rows in range(0, len(weight), _CHUNK):
        groups = weight[rows : rows + _CHUNK].unflatten(1, (-1, 4))
        first, second = values[rows : rows + _CHUNK].unflatten(1, (-1, 2)).unbind(-1)
        bits = torch.zeros_like(first, dtype=torch.uint8)
        for low, high in combinations(range(4), 2):
            gone = [place for place in range(4) if place not in (low, high)]
            fits = (groups[..., low] == first) & (groups[..., high] == second) & (groups[..., gone] == 0).all(-1)
            bits = torch.where(fits & (bits == 0), (1 << low) | (1 << high), bits)
        parts.append(bits)
    bits = torch.cat(parts)
    return None if bool((bits == 0).any()) else _joined(bits)


def sparse_linear(x: Tensor, weight: Sparse24, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x [..., K] times the 2:4 sparse weight [N, K] of `compress_24`, plus bias [N]: [..., N]. No gradient to the weight.

    On Hopper few rows run in a kernel bound by reading the compressed weight; many in torch's semi-structured product.
    Raises SpecError for shapes that do not fit.
    """
    features, columns = weight.shape
    if x.dim() < 1 or x.shape[-1] != columns:
        raise SpecError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in columns",
            fix="give x [..., K] and weight [N, K], output features first",
        )
    if bias is not None and bias.shape != (features,):
        raise SpecError(
            f"bias has shape {tuple(bias.shape)}, not ({features},)",
            fix=f"give one number per output feature, {features} in all, or None",
        )
    case = {
        "dtype": x.dtype if x.dtype == weight.values.dtype else None,  # torch's product raises where they differ
        "rows": x.numel() // max(1, columns),
        "in_features": columns,
        "masked": weight.masks is not None,
        "plain": not (torch.is_grad_enabled() and x.requires_grad) and not torch.is_autocast_enabled(x.device.type),
    }
    chosen = backend_of("sparse_linear", x.device, backend, **case)
    if chosen == "gluon":
        assert weight.masks is not None
        return _sparse_op(x, weight.values, weight.masks, bias)
    if chosen == "torch" and x.numel():
        # cuSPARSELt's result is column-major; the kernels that read it want contiguous rows, as a dense product gives them.
        out = F.linear(x.reshape(-1, columns), weight.library, bias).contiguous()
        return out.view(*x.shape[:-1], features)
    return F.linear(x, weight.dense(), bias)


@torch.library.custom_op("hone::sparse_linear", mutates_args=())
def _sparse_op(x: Tensor, values: Tensor, masks: Tensor, bias: Tensor | None) -> Tensor:
    from hone.ops.linear.gluon_sparse import sparse_product

    rows, bias = x.reshape(-1, x.shape[-1]), None if bias is None else bias.contiguous()
    shape = sparse_shape(max(1, len(rows)), len(values), x.shape[-1])
    return sparse_product(rows, values.view(torch.int32), masks, bias, shape).view(*x.shape[:-1], len(values))


@_sparse_op.register_fake
def _(x: Tensor, values: Tensor, masks: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])


def _crowded(weight: Tensor) -> tuple[int, int] | None:
    """(row, group) of the first group with more than two non-zeros; None without one."""
    for rows in range(0, len(weight), _CHUNK):
        crowded = (weight[rows : rows + _CHUNK].unflatten(1, (-1, 4)) != 0).sum(-1) > 2
        if bool(crowded.any()):
            row, group = (int(i) for i in crowded.nonzero()[0])
            return rows + row, group
    return None


def _half(groups: int) -> int:
    """Half a run: groups whose masks are the low halves of as many bytes. A row that is no whole number of runs is one run."""
    return RUN // 2 if groups % RUN == 0 else groups // 2


def _joined(bits: Tensor) -> Tensor:
    """Masks of groups [N, K/4] as bytes [N, K/8]."""
    runs = bits.unflatten(1, (-1, 2, _half(bits.shape[1])))
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)


def _split(masks: Tensor) -> Tensor:
    """The inverse of `_joined`."""
    runs = masks.unflatten(1, (-1, _half(2 * masks.shape[1])))
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1)
