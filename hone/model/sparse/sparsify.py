"""A model whose 2:4 linears become compressed ones: all of them, or those that are faster so on its GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from hone.base.errors import ArtifactError, MachineError, SpecError
from hone.model.adapters.lora_linear import LoRALinear
from hone.model.adapters.lora_varied import VariedLoRALinear
from hone.model.decoder import Decoder
from hone.model.linear import Dense
from hone.model.quantized.hadamard import input_hadamard, multiply_inputs
from hone.model.sparse.semi_structured import SemiStructured
from hone.ops import linear, sparse_linear
from hone.ops.linear.sparse import Sparse24, is_24, library_problem

Sparsity = Literal["none", "2:4", "auto"]

AUTO_ROWS = 16
"""Rows of x with which `auto` times a linear's products, if it is not told."""
_FLUSHED_BYTES = 1 << 28
"""Bytes written between two timed products, so that no weight is read from a cache."""


class Sparsified(NamedTuple):
    """What `sparsify` did: how many linears run as 2:4, are not 2:4, have a shape that cannot, are faster dense; bytes saved."""

    packed: int = 0
    dense: int = 0
    unfit: int = 0
    slower: int = 0
    saved_bytes: int = 0
    why: str = ""
    """Why nothing can run as 2:4 here, with "auto"."""

    @property
    def said(self) -> str:
        """One line for the user."""
        if self.why:
            return f"no 2:4 products: {self.why}"
        kept = {"not 2:4": self.dense, "of a shape without 2:4 products": self.unfit, "faster dense": self.slower}
        rest = ", ".join(f"{count} {why}" for why, count in kept.items() if count)
        total = self.packed + self.dense + self.unfit + self.slower
        words = f"2:4 products in {self.packed} of {total} linears of the layers ({self.saved_bytes / 1e6:.4g} MB less memory)"
        return f"{words}; dense: {rest}" if rest else words


@torch.no_grad()
def sparsify(model: Decoder, sparsity: Sparsity, *, rows: int = AUTO_ROWS, where: str = "the model") -> Sparsified:
    """Replaces the dense linears of `model`'s layers whose weights are 2:4 by `SemiStructured` ones, in place.

    "2:4": all that are 2:4. "auto": those whose product with `rows` rows of x is faster so, timed here on the model's GPU;
    nothing is an error then. Raises MachineError without a GPU that has 2:4 products, SpecError for 32-bit weights,
    ArtifactError where no linear is 2:4.
    """
    if sparsity not in get_args(Sparsity):
        raise SpecError(f"sparsity is {sparsity!r}", fix=f"set it to one of {', '.join(get_args(Sparsity))}")
    if sparsity == "none":
        return Sparsified()
    problem = _problem(model, where)
    if problem is not None:
        if sparsity == "auto":
            return Sparsified(dense=sum(1 for _ in _linears(model)), why=problem.what)
        raise problem
    counts = dict.fromkeys(("packed", "dense", "unfit", "slower", "saved_bytes"), 0)
    faster: dict[tuple[int, int], bool] = {}
    for owner, name, dense in _linears(model):
        weight = dense.weight.detach()
        if not is_24(weight):
            counts["dense"] += 1
            continue
        if library_problem(weight) is not None:
            counts["unfit"] += 1
            continue
        made = SemiStructured(dense.in_features, dense.out_features, dense.bias is not None)
        made.load([{"weight": weight} if dense.bias is None else {"weight": weight, "bias": dense.bias.detach()}])
        shape = (dense.out_features, dense.in_features)
        if sparsity == "auto" and shape not in faster:
            faster[shape] = _is_faster(made.weight, weight, rows)
        if not faster.get(shape, True):
            counts["slower"] += 1
            continue
        counts["packed"] += 1
        counts["saved_bytes"] += weight.nbytes - made.weight.nbytes
        setattr(owner, name, multiply_inputs(made.train(dense.training), input_hadamard(dense)))
    torch.cuda.empty_cache()  # what is free now is for the KV cache, which is sized by the device's free memory
    found = Sparsified(**counts)
    if sparsity == "2:4" and not found.packed:
        raise _none_is(where, found)
    return found


def _linears(model: Decoder) -> Iterator[tuple[nn.Module, str, Dense]]:
    """(owner, attribute, linear) of every dense linear of one matrix in the layers; one at a time, so that each can be freed."""
    for index, layer in enumerate(model.layers):
        for path in model.config.linears(index):
            owner, _, name = path.rpartition(".")
            module, around = layer.get_submodule(path), layer.get_submodule(owner)
            while isinstance(
                module, LoRALinear | VariedLoRALinear
            ):  # its factors are added to what the linear in it computes
                module, around, name = module.inner, module, "inner"
            if type(module) is Dense:
                yield around, name, module


def _problem(model: Decoder, where: str) -> MachineError | SpecError | ArtifactError | None:
    """Why no linear of `model` can run as 2:4."""
    device, dtype = model.device, model.dtype
    if device.type != "cuda":
        return MachineError(
            f"2:4 products need an NVIDIA GPU, and the device is {device.type}",
            fix="set sparsity=none, which computes the same with the zeros as they are",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return MachineError(
            f"2:4 products need compute capability 8.0, and the GPU has {capability[0]}.{capability[1]}",
            fix="set sparsity=none, which computes the same with the zeros as they are",
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return SpecError(
            f"2:4 products take weights of 16 bits, and these are {str(dtype).removeprefix('torch.')}",
            fix="set dtype=bfloat16, or sparsity=none",
        )
    if next(_linears(model), None) is None:
        return ArtifactError(
            f"{where} has no dense linears in its layers: 2:4 products take 16-bit weights, not quantized ones or experts",
            fix="set sparsity=none, or give the model as it was before it was quantized",
        )
    return None


def _none_is(where: str, found: Sparsified) -> ArtifactError:
    return ArtifactError(
        f"none of the {found.dense + found.unfit} linears in the layers of {where} can run as 2:4: {found.dense} keep more than "
        f"two of four weights, {found.unfit} have rows that are no multiple of 32 or columns that are none of 64",
        fix="prune it first: hone compress --steps='[{kind: sparsegpt, pattern: \"2:4\"}]'; or set sparsity=none",
    )


def _is_faster(packed: Sparse24, weight: torch.Tensor, rows: int) -> bool:
    """Whether the product with `rows` rows of x is faster with the compressed weight than with the dense one."""
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return _seconds(lambda: sparse_linear(x, packed)) < _seconds(lambda: linear(x, weight))


def _seconds(run: Callable[[], Any]) -> float:
    """Median seconds of `run` in a CUDA graph, as decode steps run it, with nothing in the cache before it; with the flush."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flushed.zero_()
        run()
    taken = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)
