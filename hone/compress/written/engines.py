"""Engines: whether the one that is to serve a compressed folder loads its formats.

vLLM: what version 0.26.0 loaded on a Hopper GPU with hone's log-probabilities (benchmarks/load_in_vllm.py; the matrix in
docs/compression.md is made from its ledger). A format that was not tried there counts as refused. llama.cpp: what `hone export`
writes without rounding again. transformers: tests/compress/written/test_export_loaders.py and test_formats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from hone.base.errors import SpecError
from hone.compress.spec import Engine
from hone.compress.targets import EMBEDDED, HEAD
from hone.exports.gguf import architectures
from hone.exports.gguf import source as sources
from hone.ops.rounding.inputs import ACTIVATIONS

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.quantized.scheme import CacheScheme, Scheme

_IN_VLLM: dict[str, tuple[str, ...]] = {
    "pack-quantized": ("none", "int8_token", "fp8_token"),
    "int-quantized": ("int8_token", "int8_token_asymmetric", "int8_tensor"),
    "float-quantized": ("none", "fp8_token", "fp8_tensor"),
    "nvfp4-pack-quantized": ("none", "nvfp4"),
    "mxfp4-pack-quantized": ("none",),
    "mxfp8-quantized": ("mxfp8",),
    **dict.fromkeys(("gptq", "gptq_v2", "awq", "fp8", "nf4", "nf4-nested"), ("none",)),
}
"""The roundings of inputs (names of ACTIVATIONS) with which vLLM loads a layout."""
_HEAD_IN_VLLM = {"pack-quantized": "none", "gptq": "none", "float-quantized": "fp8_token"}
"""The layouts, with the rounding of inputs, in which vLLM was seen to load a head."""
_GROUPS = (0, 32, 64, 128)
"""Columns that share a scale in vLLM's kernels of packed integers; 0: a whole row."""


class Refused(SpecError):
    """The engine does not load a format."""


class Written(NamedTuple):
    """What a compression writes: the scheme of each quantized matrix by its name with the matrix's input features, the scheme
    of the KV cache, the steps that leave factors in place of weights and an adapter beside them, and whether inputs are multiplied
    by Hadamard matrices."""

    config: ModelConfig
    schemes: tuple[tuple[str, Scheme, int], ...]
    cache: CacheScheme | None = None
    factored: str | None = None
    adapter: str | None = None
    hadamards: bool = False


def check(engine: Engine, written: Written) -> None:
    """Raises Refused, with the way out, where `engine` does not load what is written."""
    for problem, fix in _PROBLEMS[engine](written):
        raise Refused(f"{engine} does not load {problem}", fix=f"{fix}, or engine=any to write it all the same")


def dequantizes(written: Written) -> bool:
    """Whether transformers loads the embedding with `dequantize=True` alone, which has all weights as floats from then on.

    As of 5.23 with compressed-tensors 0.20 it initializes an embedding without a `weight`, which packed codes have not, and a head
    tied to one whose `weight` are codes multiplies those.
    """
    form = next((scheme for name, scheme, _ in written.schemes if name == EMBEDDED), None)
    whole = ("int-quantized", "float-quantized")
    return form is not None and (written.config.tie_embeddings or form.layout not in whole)


def alike(written: Written) -> bool:
    """Whether all matrices have one scheme, and no inputs are rounded: `dequantize=True` reads the first scheme for all."""
    schemes = {scheme for _, scheme, _ in written.schemes}
    return len(schemes) == 1 and next(iter(schemes)).activations is None


def _hone(written: Written) -> Iterable[tuple[str, str]]:
    return ()


def _whole(written: Written) -> Iterable[tuple[str, str]]:
    if written.factored is not None:
        yield f"factors in place of weights ({written.factored})", "use eora or loftq beside a quantizer"
    apart = (name for name, scheme, _ in written.schemes if scheme.layout != "mxfp4")
    expert = next((name for name in apart if name.rpartition(".")[2].isdigit()), None)
    if expert is not None:
        yield (
            f"quantized experts, which were not tried there ({expert})",
            r"leave experts unchanged, ignore=['lm_head', '\.experts\.']",
        )


def _transformers(written: Written) -> Iterable[tuple[str, str]]:
    yield from _whole(written)
    stored = {(scheme.bits, scheme.group_size) for _, scheme, _ in written.schemes}
    if dequantizes(written) and not alike(written):
        what = "tied to the head" if written.config.tie_embeddings else "packed"
        yield (
            f"a quantized embedding that is {what} beside matrices of other schemes",
            "give all the same bits, group_size and activations=none, or leave embed_tokens out of targets",
        )
    for name, scheme, _ in written.schemes:
        if scheme.layout not in ("gptq", "gptq_v2"):
            continue
        if name == HEAD:  # optimum puts quantized linears into the layers alone, with the same bits and groups
            yield f"lm_head in the layout {scheme.layout}", "use layout=pack-quantized, or ignore=['lm_head']"
        if len(stored) > 1:
            yield f"the layout {scheme.layout} with bits or groups that differ, at {name}", "use layout=pack-quantized"


def _vllm(written: Written) -> Iterable[tuple[str, str]]:
    yield from _whole(written)
    for name, scheme, _ in written.schemes:
        rounding = next((known for known, one in ACTIVATIONS.items() if one == scheme.activations), "none")
        what = f"{scheme.described} with activations {rounding}, at {name}"
        able = _IN_VLLM.get(scheme.layout)
        if name == EMBEDDED:
            yield f"a quantized embedding, which was not tried there ({what})", "leave embed_tokens out of targets"
        if name == HEAD and (_HEAD_IN_VLLM.get(scheme.layout) != rounding or scheme.block is not None):
            yield f"a quantized lm_head, which was not tried there ({what})", "set ignore=['lm_head']"
        if scheme.layout == "mxfp4":
            yield (
                f"experts in the layout mxfp4 as hone writes them, which were not tried there ({name})",
                "compare them first",
            )
        elif able is None:
            yield f"the layout {scheme.layout}, at {name}", "use rtn, gptq, fp8, nvfp4 or nf4"
        elif scheme.permuted:
            yield f"groups of sorted columns ({what})", "use gptq, whose groups are of neighbours"
        elif scheme.block is not None and scheme.number == "int":
            yield what, "use fp8 with strategy=block, or rtn with bits=8 and group_size=0"
        elif rounding not in able:
            yield what, f"use activations={' or '.join(able)}"
        elif scheme.block is not None and scheme.layout == "float-quantized":
            yield what, "use layout=fp8"
        elif scheme.layout in ("gptq", "gptq_v2") and (scheme.bits not in (4, 8) or not scheme.symmetric):
            yield what, "use 4 or 8 bits and symmetric=true, or layout=pack-quantized"
        elif scheme.layout == "pack-quantized":
            yield from _packed(scheme, rounding, what)
    if written.cache is not None and written.cache.number != "e4m3":
        yield "scales of an int8 KV cache", "use number=fp8"


def _packed(scheme: Scheme, rounding: str, what: str) -> Iterable[tuple[str, str]]:
    if scheme.group_size not in _GROUPS:
        yield f"groups of {scheme.group_size} ({what})", f"use group_size {', '.join(map(str, _GROUPS[1:]))} or 0"
    if not scheme.symmetric and scheme.bits not in (4, 8):
        yield what, "use symmetric=true, 4 bits or 8"
    if rounding != "none" and scheme.bits != 4:
        yield what, "use 4 bits; 8 bits with group_size=0 have another layout"


def _llama(written: Written) -> Iterable[tuple[str, str]]:
    yield from _whole(written)
    architectures.hyperparameters(written.config, "this model")
    if written.adapter is not None:
        yield f"adapters ({written.adapter})", "merge it into the weights before the export"
    if written.hadamards:
        yield "inputs that are multiplied by Hadamard matrices", "use rotation with r4=false"
    if written.cache is not None:
        yield "scales of a KV cache", "leave kv_cache out: llama.cpp's --cache-type-k needs none"
    for name, scheme, columns in written.schemes:
        what = f"{scheme.described}, at {name}"
        if scheme.activations is not None:
            yield f"the rounding of inputs ({what})", "use activations=none"
        elif sources.holding(scheme, columns) is None:
            yield what, "use rtn or gptq with 4, 5 or 8 bits, symmetric, group_size=32 and scale_dtype=float16"


_PROBLEMS: dict[str, Callable[[Written], Iterable[tuple[str, str]]]] = {
    "any": _hone,
    "hone": _hone,
    "transformers": _transformers,
    "vllm": _vllm,
    "llama.cpp": _llama,
}
