"""Choice of the backend of attention: the rules of `hone.ops.dispatch` for the training's passes, pages and latents."""

from __future__ import annotations

import torch

from hone.ops.cpu.rules import HALVES
from hone.ops.where import Choice, Where


def attend(
    where: Where, *, dtype: torch.dtype, head_dim: int, v_dim: int, block: int, dense: bool, plain: bool
) -> Choice:
    """`plain`: without lse, softcap and sinks. `block` is that of the mask's table, 0 without one. `dense`: long sequences
    under the full mask or a square causal one, and no softcap."""
    library = Choice("torch" if plain else "reference", "")
    if where.kind != "cuda":
        return Choice(library.backend, "no GPU: torch's attention, or the reference for options that it lacks")
    if dtype not in HALVES:
        return Choice(library.backend, f"the kernels take bfloat16 and float16, not {dtype}")
    if max(head_dim, v_dim) > 256:
        return Choice(library.backend, f"the kernels' heads are up to 256 wide, not {max(head_dim, v_dim)}")
    return _flash(where, head_dim, v_dim, block, dense)


def attend_backward(where: Where, *, head_dim: int, v_dim: int, block: int, dense: bool, deterministic: bool) -> Choice:
    """Called only where a kernel ran forward."""
    if deterministic:
        return Choice("triton", "no atomic additions")
    return _flash(where, head_dim, v_dim, block, dense)


def _flash(where: Where, head_dim: int, v_dim: int, block: int, dense: bool) -> Choice:
    if not where.runs_gluon:
        return Choice("triton", "Gluon kernels need compute capability 9.0")
    if head_dim != v_dim or head_dim not in (64, 128):
        alike = head_dim == v_dim and head_dim >= 96 and head_dim % 8 == 0
        if dense and (alike or (head_dim, v_dim) == (192, 128)):
            return Choice(
                "cudnn",
                f"heads of {head_dim} and {v_dim} and a dense mask, on which cuDNN's kernels are faster than Triton's",
            )
        return Choice("triton", f"Gluon kernels have heads of 64 and 128, not {head_dim} and {v_dim}")
    if block % 128:
        return Choice("triton", f"tiles of 128 cross the table's blocks of {block}")
    return Choice("gluon", "Hopper's asynchronous products")


def attend_paged(
    where: Where,
    *,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    rows: int,
    softcap: bool = False,
) -> Choice:
    if softcap:
        return Choice("reference", "the paged kernels have no softcap on the scores")
    formats = (dtype, torch.float8_e4m3fn, torch.int8)
    if dtype not in HALVES or page_dtype not in formats:
        return Choice("reference", f"the kernels take 16-bit queries over pages of the same or 8 bits, not {dtype}")
    if max(head_dim, v_dim) > 256:
        return Choice("reference", f"the kernels' heads are up to 256 wide, not {max(head_dim, v_dim)}")
    if page_dtype == torch.float8_e4m3fn and where.capability < (8, 9):
        return Choice("reference", "float8 needs compute capability 8.9")
    if page_dtype != dtype and (head_dim % 4 or v_dim % 4 or min(head_dim, v_dim) <= 32):
        return Choice("reference", f"8-bit heads are wider than 32 and a multiple of 4, not {head_dim} and {v_dim}")
    if rows > 8192:
        return Choice("reference", f"the kernels schedule up to 8192 sequences, not {rows}")
    return Choice("triton", "pages are read in place, split evenly whatever the lengths")


def attend_latent(
    where: Where,
    *,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    heads: int,
    value_dim: int,
    rope_dim: int,
    rows: int,
    boxed: bool = False,
) -> Choice:
    """`boxed`: pages hold whole blocks of 64 aligned latents, and there is no window."""
    if dtype not in HALVES or page_dtype != dtype:
        return Choice("reference", f"the kernel takes 16-bit queries and latents, not {dtype} and {page_dtype}")
    if value_dim != 512 or rope_dim != 64:
        return Choice("reference", f"the kernel takes latents of 512 + 64, not {value_dim} + {rope_dim}")
    if heads > 64 and heads % 64:
        return Choice("reference", f"the kernel takes up to 64 heads, or a multiple of 64, not {heads}")
    if rows > 8192:
        return Choice("reference", f"the kernel schedules up to 8192 sequences, not {rows}")
    if where.runs_gluon and heads > 32 and boxed:
        return Choice("gluon", "many heads: compute-bound, on Hopper's tensor cores")
    return Choice("triton", "latents are read once for up to 64 heads")
