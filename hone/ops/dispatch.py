"""Choice of the backend of an operation: pure rules from shapes, dtype and device to a name and a reason.

No other file chooses. `choose` needs no device, so planners can call it; operations call `backend_of`, which a caller's
`backend` overrides.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from typing import Any

import torch

from hone.base.errors import SpecError
from hone.ops.attention_rules import attend, attend_backward, attend_latent, attend_paged
from hone.ops.cpu.isa import cpu_isa
from hone.ops.cpu.rules import GATHERED, HALVES, ON_CPU, UP_TO_32
from hone.ops.linear.shapes import gated_fill, gated_pays
from hone.ops.moe.rules import choose_experts, expert_swiglu, grouped_linear
from hone.ops.where import Choice, Where


def choose(op: str, where: Where, *, compiling: bool = False, **case: Any) -> Choice:
    """The backend of `op` ('attend', 'linear', ...) for `case`: the shapes, dtype and options that the op's rule takes.

    A pure function: equal arguments give an equal result on any machine. `compiling`: torch.compile is tracing the call.
    Raises SpecError for an op without a rule.
    """
    if op not in RULES:
        raise SpecError(f"op is {op!r}, which has no rule", fix=f"give one of {', '.join(RULES)}")
    if where.kind == "cpu" and where.cpu and op in ON_CPU and not compiling:
        return ON_CPU[op](where, **case)
    if where.kind != "cuda" and op in NO_GPU:
        return NO_GPU[op]
    if compiling and op in COMPILED:
        return COMPILED[op]
    if where.kind == "cuda" and not where.runs_triton:
        return Choice("reference", _why_no_triton(where))
    return RULES[op](where, **case)


def locate(device: torch.device | str) -> Where:
    """`Where` of a torch device."""
    if isinstance(device, str):
        device = torch.device(device)
    if torch.compiler.is_compiling():
        return Where(*_traced(device.type, device.index or 0))
    return _locate(device.type, device.index or 0)


@torch.compiler.assume_constant_result  # a graph is compiled for one device, and the tracer cannot look for packages
def _traced(kind: str, index: int) -> tuple[Any, ...]:
    return astuple(_locate(kind, index))


@cache
def _locate(kind: str, index: int) -> Where:
    if kind != "cuda":
        return Where(kind, triton=triton_version(), cpu=cpu_isa() if kind == "cpu" else "")
    properties = torch.cuda.get_device_properties(index)
    return Where(kind, (properties.major, properties.minor), properties.multi_processor_count, triton_version())


@cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton, (0, 0) when there is none."""
    if importlib.util.find_spec("triton") is None:
        return (0, 0)
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def backend_of(op: str, device: torch.device, forced: str | None = None, **case: Any) -> str:
    """The backend's name: `forced` (for tests), else the chosen one. Warns once where a GPU runs the reference.

    Raises SpecError for a forced name that the op does not have.
    """
    if forced is not None:
        if forced not in BACKENDS[op]:
            said = f"backend is {forced!r}; that of {op} may be {', '.join(BACKENDS[op])}"
            raise SpecError(said, fix="leave backend out to get the fastest one, or give one of these")
        return forced
    where = locate(device)
    choice = choose(op, where, compiling=torch.compiler.is_compiling(), **case)
    if choice.backend == "reference" and where.kind == "cuda":
        say_once(f"{op} runs its plain torch reference on {device.type}: {choice.reason}")
    return choice.backend


def runs_kernel(op: str, device: torch.device, **case: Any) -> bool:
    """Whether `op` runs a kernel of hone's on `device`, not torch's operations or its plain reference."""
    return choose(op, locate(device), **case).backend in KERNELS


@torch.compiler.assume_constant_result  # else torch.compile would trace the cache
def say_once(text: str) -> None:
    """Warns with `text` once per process."""
    _say(text)


@cache
def _say(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _why_no_triton(where: Where) -> str:
    if where.triton == (0, 0):
        return "Triton is not installed"
    if where.triton < (3, 6):
        return f"Triton {where.triton[0]}.{where.triton[1]} is older than 3.6"
    return f"compute capability {where.capability[0]}.{where.capability[1]} is below 8.0"


# One rule per op, in the order of hone.ops; each takes `where` and the op's case by name and returns a Choice.


def _by_dtype(otherwise: str, dtypes: tuple[torch.dtype, ...], reason: str) -> Callable[..., Choice]:
    """The rule of an op whose kernel takes any shape of `dtypes`."""

    def rule(where: Where, *, dtype: torch.dtype) -> Choice:
        if dtype not in dtypes:
            taken = ", ".join(str(one).removeprefix("torch.") for one in dtypes)
            return Choice(otherwise, f"the kernel takes {taken}, not {dtype}")
        return Choice("triton", reason)

    return rule


def _rms_norm(
    where: Where, *, dtype: torch.dtype, weight_dtype: torch.dtype, width: int, offset: bool = False
) -> Choice:
    if offset:
        return Choice("torch", "the kernel multiplies by the weight as it is stored, without an offset")
    if dtype not in UP_TO_32 or weight_dtype != dtype:
        return Choice(
            "torch", f"the kernel takes x and weight of one dtype up to 32 bits, not {dtype} and {weight_dtype}"
        )
    if width > 16384:
        return Choice("torch", f"a row of {width} values does not fit a program's registers")
    return Choice("triton", "one pass over memory")


def _linear_cross_entropy(
    where: Where, *, dtype: torch.dtype, softcap: bool = False, divergence: bool = False
) -> Choice:
    if softcap:
        return Choice("reference", "the kernel has no softcap on the logits")
    if divergence:
        return Choice("reference", "of a teacher the kernel has KL(teacher || student) over one vocabulary alone")
    if dtype not in UP_TO_32:
        return Choice("reference", f"the kernel takes dtypes of 16 and 32 bits, not {dtype}")
    return Choice("triton", "library products around one kernel a chunk")


def _scan(where: Where, *, dtype: torch.dtype, dim_k: int, dim_v: int, seq_len: int, decay: str) -> Choice:
    """`decay` is 'none', 'head', 'token' or 'channel'."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Choice("reference", f"the Triton kernels take bfloat16 and float16, not {dtype}")
    if max(dim_k, dim_v) > 256:
        return Choice("reference", f"a state of {dim_k} x {dim_v} does not fit: head dimensions go up to 256")
    if decay == "channel":
        return Choice("triton", "decays per channel: pairs within chunks first, then the states from chunk to chunk")
    if where.runs_gluon and dtype == torch.bfloat16 and 32 < dim_k <= 128 and 32 < dim_v <= 128 and seq_len > 16:
        return Choice("gluon", "chunked kernels, the state in registers, loads and products overlapped for Hopper")
    return Choice("triton", "chunked kernels, the state in registers")


def _linear(
    where: Where, *, dtype: torch.dtype | None, rows: int, out_features: int, in_features: int, in_rows: bool, plain: bool
) -> Choice:  # fmt: skip
    """`dtype` None: the tensors' dtypes differ. `in_rows`: the weight's rows are contiguous. `plain`: neither gradients nor
    autocast."""
    if not plain:
        return Choice("cublas", "gradients and autocast need torch's product")
    if dtype not in HALVES:
        return Choice("cublas", f"the kernel takes bfloat16 and float16, not {dtype}")
    if rows > 64:
        return Choice("cublas", f"{rows} rows are compute-bound: the library is fastest")
    if in_features % 8 or not in_features:
        return Choice("cublas", f"rows of {in_features} numbers are not 16-byte aligned")
    if not in_rows:
        return Choice("cublas", "the weight is a transposed view, which the library reads without a copy")
    return Choice("triton", f"{rows} rows: the weight is read once, split over the whole GPU")


def _gated_linear(
    where: Where, *, dtype: torch.dtype | None, rows: int, features: int, in_features: int, in_rows: bool, plain: bool
) -> Choice:  # fmt: skip
    """As `_linear`, of a weight of 2 `features` rows; `in_rows`: its rows are contiguous and aligned."""
    if not plain:
        return Choice("separate", "gradients and autocast need a product and a gate of their own")
    if not where.runs_gluon or dtype not in HALVES:
        return Choice("separate", "the kernel is made for Hopper's asynchronous products of 16 bits")
    if in_features % 8 or features % 8 or not (in_features and in_rows):
        return Choice("separate", f"rows of {in_features} or {features} numbers are not 16-byte aligned")
    if not gated_pays(rows, features, in_features, where.num_sms):
        filled = gated_fill(rows, features, where.num_sms)
        return Choice("separate", f"{rows} rows fill {filled:.0%} of the kernel's tiles: the library has smaller ones")
    return Choice("gluon", f"{rows} rows: the product is gated before it is written")


def _quantized_linear(
    where: Where,
    *,
    dtype: torch.dtype,
    rows: int,
    bits: int,
    group_size: int,
    in_features: int,
    tiled: bool,
    plain: bool,
) -> Choice:
    """`plain`: no gradient to x. `group_size` is `in_features` where a row has one scale."""
    if not tiled:
        return Choice("reference", "the codes are not tiled for the kernel")
    if not plain:
        return Choice("reference", "the kernel has no gradient to x")
    if not where.runs_gluon:
        return Choice("reference", "the kernel needs Hopper's tensor cores")
    if dtype not in HALVES:
        return Choice("reference", f"the kernel takes bfloat16 and float16, not {dtype}")
    if group_size != in_features and (group_size < 32 or group_size & (group_size - 1)):
        return Choice("reference", f"groups of {group_size} columns: the kernel takes powers of two from 32 on")
    return Choice("gluon", f"{bits}-bit codes are dequantized in registers")


def _fp8_linear(
    where: Where, *, dtype: torch.dtype, rows: int, out_features: int, in_features: int, blockwise: bool,
    integer: bool = False,
) -> Choice:  # fmt: skip
    """`dtype` is the output's. `integer`: the codes are int8."""
    if integer and in_features % 16 == 0:
        return Choice("triton" if rows <= 64 or out_features % 8 else "torch", f"{rows} rows of int8 codes")
    if where.capability < (8, 9):
        return Choice("reference", "this GPU has no fp8 tensor cores")
    if in_features % 16:
        return Choice("reference", f"rows of {in_features} codes are not 16-byte aligned")
    if rows > 256 and not blockwise and dtype == torch.bfloat16 and out_features % 16 == 0:
        return Choice("torch", f"{rows} rows are compute-bound: torch's scaled product is fastest")
    return Choice("triton", f"{rows} rows {'in blocks of 128' if blockwise else 'with one scale each'}")


def _fp8_block_product(
    where: Where, *, dtype: torch.dtype, columns: int, width: int, square: bool, library: bool
) -> Choice:  # fmt: skip
    """Of codes [.., width] by codes [columns, width], both in tiles, or with `square` blocks of 128 x 128 for the second; `dtype` is
    the output's. `library`: torch has cuBLAS's products in blocks."""
    if where.capability < (8, 9):
        return Choice("reference", "this GPU has no fp8 tensor cores")
    if not library or where.capability != (9, 0):
        return Choice("triton", "cuBLAS has products in blocks of 128 from CUDA 12.9 on, for Hopper alone")
    # Where 512 does not divide the sums, versions of torch differ in the padding of a weight's scales.
    if dtype != torch.bfloat16 or width % (512 if square else 128) or (square and columns % 128):
        return Choice("triton", f"cuBLAS does not scale {columns} columns of {width} so, or not in {dtype}")
    return Choice("cublas", "the library's kernel, scaled every 128 of the sum")


def _fp8_grouped_linear(where: Where) -> Choice:
    if where.runs_gluon:
        return Choice("gluon", "Hopper's asynchronous products of codes, without padding")
    return Choice("reference", "products of several experts' fp8 codes are made for Hopper alone")


def _sparse_linear(
    where: Where, *, dtype: torch.dtype | None, rows: int, in_features: int, masked: bool, plain: bool
) -> Choice:
    """`masked`: the kernel's form of the weight exists. `plain`: neither a gradient to x nor autocast."""
    if rows > 64:
        return Choice("torch", f"{rows} rows: the library's sparse product")
    if not (where.runs_gluon and masked and plain) or dtype not in HALVES or in_features % 256:
        return Choice("torch", "the kernel for few rows needs Hopper, 16 bits, 256s of columns and no gradient")
    return Choice("gluon", f"{rows} rows: the compressed weight is read once and unpacked in registers")


def _dequantize_nf4(where: Where, *, dtype: torch.dtype, width: int) -> Choice:
    """`width`: weights of a block, which share a scale."""
    if width % 8:
        return Choice("reference", f"the kernel reads 8 codes at once, and {width} share a scale")
    if dtype not in UP_TO_32:
        return Choice("reference", f"the kernel takes dtypes of 16 and 32 bits, not {dtype}")
    return Choice("triton", "both levels of scales in one pass over memory")


def _lora_slots(where: Where, *, dtype: torch.dtype, rank: int) -> Choice:
    """`rank` is the largest that a slot holds."""
    if dtype not in UP_TO_32 or rank % 16:
        return Choice(
            "reference", f"the kernels take dtypes up to 32 bits and slots of 16 ranks, not {dtype} and {rank}"
        )
    return Choice("triton", "each row by the factors of its slot, nothing sorted")


def _slotted_linear(
    where: Where, *, dtype: torch.dtype | None, rows: int, in_features: int, rank: int, fits: bool
) -> Choice:
    """`dtype` None: the tensors' dtypes differ. `fits`: no block of output features is of two pieces."""
    if dtype not in HALVES or rank % 16 or in_features % 8 or rows > 64 or not fits:
        return Choice(
            "products", f"{rows} rows of {in_features} numbers in {dtype}, rank {rank}: products one after another"
        )
    return Choice("triton", f"{rows} rows: the factors are more columns of the weight")


_CHOOSING = ("sample", "penalize", "token_logprobs", "apply_token_bitmask")
_PASSES = ("adamw_step", "widen", "clamped_swiglu")
_SWEEPS = ("round_compensated", "prune_compensated")
_SLOTS = ("lora_shrink", "lora_expand")
RULES: dict[str, Callable[..., Choice]] = {
    "attend": attend,
    "attend_backward": attend_backward,
    "attend_paged": attend_paged,
    "attend_latent": attend_latent,
    "attend_shared": lambda where, **case: attend_paged(where, rows=1, **case),
    "scan": _scan,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "quantized_linear": _quantized_linear,
    "fp8_linear": _fp8_linear,
    "fp8_block_product": _fp8_block_product,
    "fp8_grouped_linear": _fp8_grouped_linear,
    "sparse_linear": _sparse_linear,
    "dequantize_nf4": _dequantize_nf4,
    **dict.fromkeys(("input_codes", "fp8_cast"), _by_dtype("reference", UP_TO_32, "one pass over memory")),
    "dora_linear": _by_dtype("reference", UP_TO_32, "rows stretched in one pass over memory"),
    **dict.fromkeys(_SLOTS, _lora_slots),
    "slotted_linear": _slotted_linear,
    "rms_norm": _rms_norm,
    **dict.fromkeys(
        ("rope", "rope_in_place", "rope_write", "swiglu"), _by_dtype("torch", UP_TO_32, "one pass over memory")
    ),
    "geglu": lambda where: Choice("torch", "there is no kernel: torch's gelu and a product"),
    "linear_cross_entropy": _linear_cross_entropy,
    "grouped_linear": grouped_linear,
    "permute": _by_dtype("reference", UP_TO_32, "counting sort in two kernels"),
    "choose_experts": choose_experts,
    "expert_swiglu": expert_swiglu,
    **dict.fromkeys(_CHOOSING, _by_dtype("reference", UP_TO_32, "one pass over the logits")),
    "count_tokens": _by_dtype("reference", (torch.int32,), "one atomic operation a token"),
    **dict.fromkeys(_SWEEPS, _by_dtype("reference", (torch.float32,), "one launch for 64 columns, not five a column")),
    **dict.fromkeys(_PASSES, _by_dtype("reference", UP_TO_32, "one pass over memory")),
}
"""Rules for a GPU with Triton; that of `attend` covers every device."""

NO_GPU: dict[str, Choice] = {
    **dict.fromkeys(
        ("rms_norm", "rope", "rope_in_place", "rope_write", "swiglu", "geglu"),
        Choice("torch", "no GPU: torch in few passes over memory"),
    ),
    "linear_cross_entropy": Choice("reference", "no GPU: chunks that stay in the CPU's cache"),
    "scan": Choice("reference", "no GPU: chunks of matrix products in torch"),
    **dict.fromkeys(
        ("attend_paged", "attend_latent", "attend_shared"),
        GATHERED,
    ),
    "grouped_linear": Choice("reference", "no GPU: one product an expert"),
    "permute": Choice("reference", "no GPU: torch's stable sort"),
    "choose_experts": Choice("reference", "no GPU: torch's product and topk"),
    "expert_swiglu": Choice("reference", "no GPU: one expert after another"),
    **dict.fromkeys((*_CHOOSING, "count_tokens"), Choice("reference", "no GPU: torch's sort, argmax and masks")),
    **dict.fromkeys(_SWEEPS, Choice("reference", "no GPU: torch, a column at a time")),
    **dict.fromkeys(_PASSES, Choice("reference", "no GPU: torch in few passes over memory")),
    "linear": Choice("reference", "no GPU: torch's product"),
    "gated_linear": Choice("separate", "no GPU: a product, then its gate"),
    **dict.fromkeys(_SLOTS, Choice("reference", "no GPU: torch's products, a slot at a time")),
    "slotted_linear": Choice("products", "no GPU: products one after another"),
    "quantized_linear": Choice("reference", "no GPU: weights are unpacked and multiplied by torch"),
    "fp8_linear": Choice("reference", "no GPU: codes are dequantized and multiplied by torch"),
    **dict.fromkeys(
        ("fp8_block_product", "fp8_grouped_linear"),
        Choice("reference", "no GPU: codes are decoded, products in float32"),
    ),
    **dict.fromkeys(("input_codes", "fp8_cast"), Choice("reference", "no GPU: torch in few passes over memory")),
    "sparse_linear": Choice("reference", "no GPU: the weight is unpacked and multiplied by torch"),
    "dora_linear": Choice("reference", "no GPU: torch in few passes over memory"),
    "dequantize_nf4": Choice("reference", "no GPU: torch looks up two codes at a time"),
}
"""Choices without a GPU, for any case."""

_INTO_ONE = Choice("torch", "torch.compile fuses it with the operations around it")
COMPILED: dict[str, Choice] = {
    **dict.fromkeys(("rms_norm", "rope", "swiglu"), _INTO_ONE),
    "clamped_swiglu": Choice("reference", _INTO_ONE.reason),
}
"""Choices under torch.compile, for any case."""

_ROWS_OPS = ("reference", "torch", "triton")
_FLASH = ("gluon", "triton", "cudnn")

BACKENDS: dict[str, tuple[str, ...]] = {
    "attend": ("reference", "torch", *_FLASH),
    "attend_backward": _FLASH,
    "attend_paged": ("reference", "compiled", "triton"),
    "attend_shared": ("reference", "triton"),
    "attend_latent": ("reference", "triton", "gluon"),
    "scan": ("reference", "triton", "gluon"),
    "linear": ("reference", "compiled", "cublas", "triton"),
    "gated_linear": ("separate", "gluon"),
    "slotted_linear": ("products", "triton"),
    "quantized_linear": ("reference", "compiled", "gluon"),
    "fp8_linear": ("reference", "torch", "triton"),
    "fp8_block_product": ("reference", "cublas", "triton"),
    "fp8_grouped_linear": ("reference", "gluon"),
    "sparse_linear": ("reference", "torch", "gluon"),
    **dict.fromkeys(("dora_linear", "dequantize_nf4"), ("reference", "triton")),
    **dict.fromkeys(("input_codes", "fp8_cast"), ("reference", "triton")),
    **dict.fromkeys(("rms_norm", "rope", "rope_in_place", "rope_write", "swiglu"), _ROWS_OPS),
    "geglu": ("reference", "torch"),
    "linear_cross_entropy": ("reference", "triton"),
    "grouped_linear": ("reference", "torch", "triton", "gluon"),
    "permute": ("reference", "triton"),
    "choose_experts": ("reference", "triton"),
    "expert_swiglu": ("reference", "grouped", "triton"),
    **dict.fromkeys((*_CHOOSING, "count_tokens", *_SWEEPS, *_PASSES, *_SLOTS), ("reference", "triton")),
}
"""The backends of each op: a rule returns one of them, and `backend` may force one."""

KERNELS = {"compiled", "triton", "gluon"}
"""The backends whose kernels are hone's own."""
