"""Decode steps of a whole decoder as one compiled call on a CPU: no Python and no torch between its operations.

Covers pre-norm decoders of attention with rotary positions and SwiGLU (Llama, Mistral, Qwen2, Qwen3 and their like), with
dense weights or integer codes of 4 and 8 bits. Other models run layer by layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.model.decoder import Decoder, DecoderLayer
from hone.model.feed_forwards.swiglu import SwiGLULayer
from hone.model.linear import Dense
from hone.model.mixers.attention import AttentionLayer
from hone.model.norm import OffsetRMSNorm, RMSNorm
from hone.model.quantized.packed_int import PackedInt
from hone.ops.cpu.isa import cpu_isa
from hone.ops.cpu.pages import use_huge_pages
from hone.ops.cpu.program import Program, scratch_bytes
from hone.ops.cpu.rules import FEW_ROWS
from hone.ops.dispatch import choose, locate, say_once
from hone.serve.paging.cache import KVCache

MOST_ROWS = FEW_ROWS
"""Sequences of a compiled step. With more, torch's matrix products are faster."""


class CompiledStep:
    """The program of a model's layers for up to `MOST_ROWS` sequences of one new token each, over one cache."""

    def __init__(self, model: Decoder, cache: KVCache, longest: int) -> None:
        self._model, self._cache = model, cache
        self.longest = longest
        """Tokens of the longest sequence that there are rotary angles for."""
        config, dtype = model.config, model.dtype
        program = self._program = Program(dtype, MOST_ROWS, scratch_bytes(config.layers[0].mixer.head_dim))
        x = program.floats(config.hidden_size)
        self._first = program.widen(torch.empty(1, config.hidden_size, dtype=dtype), x)
        buffers: dict[Any, Tensor] = {}
        for layer in model.layers:
            self._layer(layer, layer.mixer.layer, x, buffers)  # of a pipeline's stage the first is not layer 0
        self._last = program.narrow(x, torch.empty(1, config.hidden_size, dtype=dtype))
        use_huge_pages([*model.parameters(), *model.buffers()])

    def __call__(self, x: Tensor, sequences: tuple[Tensor, ...]) -> Tensor:
        """The layers' output [S, D] for embeddings x [S, D]; keys and values go to the cache. `sequences`: see `Program.run`."""
        out = torch.empty_like(x)
        self._program.point(self._first, x)
        self._program.point_out(self._last, out)
        self._program.run(len(x), sequences)
        return out

    def _layer(self, layer: DecoderLayer, index: int, x: Tensor, buffers: dict[Any, Tensor]) -> None:
        program, mixer, fed = self._program, layer.mixer, layer.feed_forward
        spec, size = mixer.spec, self._model.config.hidden_size
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        pages = (self._cache.layers[index]["k"], self._cache.layers[index]["v"])
        weights = {name: getattr(block, name).cpu_weight() for block, name in _linears(layer)}

        def operand(name: str, columns: int) -> Tensor:
            width = max([columns, *(one.columns for one in weights.values() if one.in_features == columns)])
            if (name, width) not in buffers:
                buffers[name, width] = program.operand(width)
            return buffers[name, width]

        def floats(name: str, columns: int) -> Tensor:
            if (name, columns) not in buffers:
                buffers[name, columns] = program.floats(columns)
            return buffers[name, columns]

        inner = fed.spec.intermediate_size
        normed, attended = operand("normed", size), operand("attended", heads[0] * heads[2])
        qkv, q = floats("qkv", (heads[0] + 2 * heads[1]) * heads[2]), operand("q", heads[0] * heads[2])
        gate_up, gated = floats("gate_up", 2 * inner), operand("gated", inner)
        self._norm(layer.mixer_norm, x, normed)
        program.product(normed, weights["qkv"], qkv)
        norms = (mixer.q_norm, mixer.k_norm) if spec.qk_norm else None
        program.rope(
            qkv, q, heads, self._angles(spec), pages,
            (None, None) if norms is None else tuple(_norm_weight(one) for one in norms),  # type: ignore[arg-type]
            0.0 if norms is None else norms[0].eps,
        )  # fmt: skip
        program.attend(q, heads, pages, mixer.options["scale"], spec.window, attended)
        program.product(attended, weights["out"], x, onto=True)
        self._norm(layer.feed_forward_norm, x, normed)
        program.product(normed, weights["gate_up"], gate_up)
        program.gate(gate_up, gated, inner)
        program.product(gated, weights["down"], x, onto=True)

    def _norm(self, norm: RMSNorm, x: Tensor, out: Tensor) -> None:
        self._program.norm(x, _norm_weight(norm), norm.eps, out)

    def _angles(self, spec: Any) -> tuple[Tensor, Tensor]:
        """cos and sin f32 [longest, Dh / 2], shared by layers."""
        key = ("compiled", spec.rope.key, spec.head_dim)
        table = self._cache.tables.get(key)
        if table is None or len(table[0]) < self.longest:
            cos, sin = spec.rope.tables(torch.arange(self.longest), spec.head_dim, torch.float32, self._cache.rope_len)
            table = self._cache.tables[key] = (cos.flatten(1).contiguous(), sin.flatten(1).contiguous())
        return table


def compiled_step(model: Decoder, cache: KVCache, rows: int, longest: int) -> CompiledStep | None:
    """The step of `model` for sequences of up to `longest` tokens; None where `rows` are too many or the model unlike."""
    if rows > MOST_ROWS:
        return None
    if model not in cache.steps:
        reason = why_not(model, cache)
        cache.steps[model] = None
        if reason is not None:
            say_once(f"decode steps on this CPU run layer by layer: {reason}")
            return None
    elif cache.steps[model] is None or cache.steps[model].longest >= longest:
        return cache.steps[model]
    step = cache.steps[model] = CompiledStep(model, cache, 1 << (longest - 1).bit_length())
    return step


def why_not(model: Decoder, cache: KVCache) -> str | None:
    """Why decode steps of `model` on a CPU run layer by layer; None when they are compiled."""
    if not cpu_isa():
        return "numba (pip install 'hone-llm[serve]') or AVX2 is missing"
    dtype = model.dtype
    if cache.kept.view(None) != (None, 0):
        return "the KV policy bounds what tokens attend to"
    if any(layer._forward_pre_hooks for layer in model.layers):  # as those that bring streamed weights
        return "a layer has a forward hook, which a compiled step would not call"
    for place, layer in enumerate(model.layers):
        index = getattr(layer.mixer, "layer", place)
        reason = _unlike(layer, cache.layers[index], dtype)
        if reason is not None:
            return f"layer {index}: {reason}"
    return None


def _unlike(layer: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> str | None:
    if type(layer) is not DecoderLayer or not layer.usual:
        return "its norms or its residual stream are unlike Llama's"
    mixer, fed = layer.mixer, layer.feed_forward
    if type(mixer) is not AttentionLayer or mixer.spec.softcap is not None or mixer.spec.sinks:
        return f"mixer '{mixer.spec.kind}' is not attention with whole rotary heads and without softcap and sinks"
    if mixer.shares_kv or hasattr(mixer, "source") or mixer.kv_rounding is not None or set(tensors) != {"k", "v"}:
        return "its keys are shared or rounded"
    if type(fed) is not SwiGLULayer:
        return f"feed-forward '{fed.spec.kind}' is not swiglu"
    spec = mixer.spec
    case = {
        "dtype": dtype,
        "page_dtype": tensors["k"].dtype,
        "head_dim": spec.head_dim,
        "v_dim": spec.head_dim,
        "rows": 1,
        "decode": True,
    }
    choice = choose("attend_paged", locate("cpu"), **case)
    if choice.backend != "compiled":
        return choice.reason
    if spec.num_heads * spec.head_dim % 32 or layer.mixer_norm.weight.numel() % 32 or fed.spec.intermediate_size % 16:
        return "its widths are no multiples of 32"
    for block, name in _linears(layer):
        linear = getattr(block, name)
        if type(linear) not in (Dense, PackedInt):
            return f"{name} ({type(linear).__name__}) has no compiled kernel for the CPU"
        choice = linear.on_cpu(dtype, 1)
        if choice.backend != "compiled":
            return f"{name}: {choice.reason}"
    return None


def _linears(layer: Any) -> tuple[tuple[Any, str], ...]:
    """(block, name) of every linear of a layer."""
    return (layer.mixer, "qkv"), (layer.mixer, "out"), (layer.feed_forward, "gate_up"), (layer.feed_forward, "down")


def _norm_weight(norm: RMSNorm) -> Tensor:
    """The weight that the norm multiplies by."""
    weight = norm.weight.detach().float()
    return weight + norm.offset if isinstance(norm, OffsetRMSNorm) else weight
