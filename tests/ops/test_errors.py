"""Every mistake in a call of hone.ops is a HoneError that names the argument and the way out, and no other error is raised."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hone.ops as ops
from hone.base import errors
from hone.base.errors import HoneError
from hone.ops.dispatch import BACKENDS, Where
from hone.ops.formats import tile_codes, tile_scales
from hone.ops.linear.sparse import compress_24
from hone.ops.moe.weights import ExpertWeights
from hone.ops.rounding.api import Pruning
from hone.ops.rounding.selection import Pattern
from hone.ops.update.api import AdamWNumbers

SOURCES = sorted(Path(ops.__file__).parent.rglob("*.py"))
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HoneError)}

Q, K = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
LSE = torch.randn(1, 4, 5)
X, W = torch.randn(3, 64), torch.randn(8, 64)
SPARSE = compress_24(W * (torch.arange(64) % 4 < 2))
CODES, SCALES = torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 2)
NIBBLES = torch.zeros(8, 32, dtype=torch.uint8)
TILES, TILE_SCALES = tile_codes(CODES, 4), tile_scales(SCALES)
FP8, ONES = torch.zeros(8, 64, dtype=torch.float8_e4m3fn), torch.ones(8)
PAGES, LATENTS = torch.zeros(3, 2, 4, 8), torch.zeros(3, 4, 8)
TABLE, LENS = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([3, 4])
PLACES, ANGLES = torch.arange(3), torch.zeros(3, 1, 4)
BETA, KEYS = torch.rand(1, 5, 4), torch.zeros(3, dtype=torch.int64)
COUNTS, THREE = torch.zeros(2, 64, dtype=torch.int32), torch.ones(3, 3)
NUMBERS = AdamWNumbers(1, 1e-3, 0.9, 0.95, 1e-8, 0.1)
MASKS = torch.full((2, 2), -1, dtype=torch.int32)
EXPERTS, ENDS, IDS = (
    torch.randn(2, 6, 64),
    torch.tensor([1, 3], dtype=torch.int32),
    torch.zeros(3, 2, dtype=torch.int64),
)
GATED, DOWN, SHARES = ExpertWeights(EXPERTS), ExpertWeights(EXPERTS[:, :3].mT), torch.ones(3, 2)


def paged(**change: Any) -> dict[str, Any]:
    """A call of attend_paged that fits: two rows of one new token each."""
    right = {
        "q": torch.zeros(2, 4, 8),
        "k_pages": PAGES,
        "v_pages": PAGES,
        "page_table": TABLE,
        "seq_lens": LENS,
        "scale": 1.0,
    }
    return right | change


def latent(**change: Any) -> dict[str, Any]:
    """A call of attend_latent that fits."""
    right = {
        "q": torch.zeros(2, 4, 8),
        "pages": LATENTS,
        "page_table": TABLE,
        "seq_lens": LENS,
        "value_dim": 6,
        "scale": 1.0,
    }
    return right | change


def written(**change: Any) -> dict[str, Any]:
    """A call of write_kv that fits."""
    rows = torch.zeros(3, 2, 8)
    return {"k": rows, "v": rows, "k_pages": PAGES, "v_pages": PAGES, "pages": PLACES, "offsets": PLACES} | change


def turned(**change: Any) -> dict[str, Any]:
    """A call of rope_write that fits."""
    return written(q=torch.zeros(3, 4, 8), cos=ANGLES, sin=ANGLES) | change


RANKS = torch.tensor([[4, 2], [1, 0]])


def expanded(**change: Any) -> dict[str, Any]:
    """A call of lora_expand that fits: two slots, pieces of 3 and 5 features."""
    right = {"narrow": torch.ones(1, 3, 2, 4), "ups": torch.ones(2, 8, 4), "slots": PLACES - 1, "ranks": RANKS}
    return right | {"y": torch.zeros(3, 8), "widths": (3, 5)} | change


def slotted(**change: Any) -> dict[str, Any]:
    """A call of slotted_linear that fits."""
    right = {"x": X, "weight": W, "bias": None, "downs": W.expand(2, 8, 64), "ups": W[:, :4].expand(2, 8, 4)}
    return right | {"slots": PLACES - 1, "ranks": RANKS, "widths": (3, 5)} | change


# Public function: (a word that the error says, the wrong call).
MISTAKES: dict[str, list[tuple[str, Callable[[], Any]]]] = {
    "apply_token_bitmask": [
        (r"bitmask \(2, 3\)", lambda: ops.apply_token_bitmask(X, MASKS.repeat(1, 2)[:, :3], PLACES)),
        ("bitmask torch.int64", lambda: ops.apply_token_bitmask(X, MASKS.long(), PLACES)),
        ("rows on cpu", lambda: ops.apply_token_bitmask(X.to("meta"), MASKS.to("meta"), PLACES)),
        ("strides", lambda: ops.apply_token_bitmask(W.T[:3, :8], MASKS[:, :1], PLACES, backend="triton")),
    ],
    "dequantize_nf4": [
        ("codes torch.int8", lambda: ops.dequantize_nf4(CODES, torch.ones(8, 2), torch.float32)),
        (r"scales torch.float32 \(8, 3\)", lambda: ops.dequantize_nf4(NIBBLES, torch.ones(8, 3), torch.float32)),
        ("scales torch.uint8", lambda: ops.dequantize_nf4(NIBBLES, NIBBLES[:, :2], torch.float32)),
    ],
    "frozen_linear": [(r"\(64, 8\), and x has 64", lambda: ops.frozen_linear(X, lambda dtype: W.T))],
    "dora_linear": [
        (
            r"A \(2, 63\)",
            lambda: ops.dora_linear(
                X, lambda dtype: W, None, W[:, 0], [W[:2, 1:]], [W[:, :2]], [W[:, 0]], scales=(1.0,)
            ),
        )
    ],
    "lora_linear": [
        (r"A \(2, 63\)", lambda: ops.lora_linear(X, lambda dtype: W, None, [W[:2, 1:]], [W[:, :2]], scale=1.0)),
        (
            "1 pieces begin",
            lambda: ops.lora_linear(X, lambda dtype: W, None, [W[:2]], [W[:, :2]], scale=1.0, begins=()),
        ),
    ],
    "lora_shrink": [
        (r"downs float32 \(2, 8, 63\)", lambda: ops.lora_shrink(X, W.expand(2, 8, 64)[..., 1:], PLACES, RANKS)),
        ("slots float32", lambda: ops.lora_shrink(X, W.expand(2, 8, 64), PLACES.float(), RANKS)),
        ("slots are on meta", lambda: ops.lora_shrink(X, W.expand(2, 8, 64), PLACES.to("meta"), RANKS)),
    ],
    "lora_expand": [
        (r"widths \[3, 4\]", lambda: ops.lora_expand(**expanded(widths=(3, 4)))),
        (r"ranks int64 \(1, 2\)", lambda: ops.lora_expand(**expanded(ranks=RANKS[:1]))),
        (r"factors float32 \(2, 8\)", lambda: ops.lora_expand(**expanded(factors=torch.ones(2, 8)))),
    ],
    "slotted_linear": [
        (r"weight float32 \(64, 8\)", lambda: ops.slotted_linear(**slotted(weight=W.T))),
        (r"downs float32 \(8, 64\)", lambda: ops.slotted_linear(**slotted(downs=W))),
        (r"widths are \[3, 4\]", lambda: ops.slotted_linear(**slotted(widths=(3, 4)))),
    ],
    "attend": [
        ("4 heads .* 3", lambda: ops.attend(Q, Q[:, :, :3], Q[:, :, :3])),
        ("k has torch.float64", lambda: ops.attend(Q, K.double(), K)),
        ("k on meta", lambda: ops.attend(Q, K.to("meta"), K)),
        ("head width", lambda: ops.attend(Q, K[..., :6], K)),
        (r"q is .* \[5, 4, 8\]", lambda: ops.attend(Q[0], K, K)),
        ("scale .* -1.0", lambda: ops.attend(Q, K, K, scale=-1.0)),
        ("softcap .* 0", lambda: ops.attend(Q, K, K, softcap=0.0)),
        (r"sinks .*\[3\]", lambda: ops.attend(Q, K, K, sinks=torch.zeros(3))),
        ("return_lse=True", lambda: ops.attend(Q, K, K, return_lse=True, backend="torch")),
    ],
    "attend_backward": [
        ("4 heads .* 3", lambda: ops.attend_backward(Q, Q[:, :, :3], Q[:, :, :3], Q, LSE, Q)),
        ("scale .* -1.0", lambda: ops.attend_backward(Q, K, K, Q, LSE, Q, scale=-1.0)),
        (r"lse .*\[1, 5, 4\], not \[1, 4, 5\]", lambda: ops.attend_backward(Q, K, K, Q, LSE.mT, Q)),
        (r"d_out .*\[1, 5, 2, 8\]", lambda: ops.attend_backward(Q, K, K, Q, LSE, K)),
    ],
    "merge": [
        ("0 parts", lambda: ops.merge([])),
        ("different shapes", lambda: ops.merge([(Q, torch.zeros(1, 4, 5)), (Q[:, 1:], torch.zeros(1, 4, 4))])),
    ],
    "attend_paged": [
        ("no multiple", lambda: ops.attend_paged(**paged(q=torch.zeros(2, 3, 8)))),
        ("different numbers", lambda: ops.attend_paged(**paged(page_table=TABLE[:1]))),
        ("sequence 1 has 1 new tokens of 9", lambda: ops.attend_paged(**paged(seq_lens=torch.tensor([3, 9])))),
        ("int8 were given without", lambda: ops.attend_paged(**paged(k_pages=PAGES.to(torch.int8)))),
        ("window of 0", lambda: ops.attend_paged(**paged(window=0))),
        ("tree is", lambda: ops.attend_paged(**paged(tree=torch.ones(2, dtype=torch.int64)))),
        ("scales", lambda: ops.attend_paged(**paged(k_scale=torch.ones(7), v_scale=torch.ones(7)))),
    ],
    "attend_shared": [
        ("shared is torch.int64", lambda: ops.attend_shared(**paged(shared=PLACES))),
        (r"seq_lens \(1,\)", lambda: ops.attend_shared(**paged(shared=PLACES.int(), seq_lens=LENS[:1]))),
    ],
    "attend_latent": [
        ("value_dim 9", lambda: ops.attend_latent(**latent(value_dim=9))),
        ("different numbers", lambda: ops.attend_latent(**latent(seq_lens=LENS[:1]))),
        ("scale", lambda: ops.attend_latent(**latent(scale=0.0))),
    ],
    "quantize_kv": [("float32", lambda: ops.quantize_kv(Q, torch.float32))],
    "write_kv": [
        ("k .* do not fit", lambda: ops.write_kv(**written(k=torch.zeros(3, 4, 8)))),
        ("2 offsets", lambda: ops.write_kv(**written(offsets=PLACES[:2]))),
        ("without k_scale", lambda: ops.write_kv(**written(k_pages=PAGES.to(torch.int8)))),
    ],
    "scan": [
        ("v has 3 heads", lambda: ops.scan(Q, K, torch.randn(1, 5, 3, 8))),
        ("k is torch.float16", lambda: ops.scan(Q, K.half(), K)),
        ("v is on meta", lambda: ops.scan(Q, K, K.to("meta"))),
        (r"decay \(3,\)", lambda: ops.scan(Q, K, K, torch.zeros(3))),
        ("state", lambda: ops.scan(Q, K, K, state=torch.zeros(1, 4, 8, 7))),
        ("reset .*float32", lambda: ops.scan(Q, K, K, reset=torch.zeros(1, 5))),
        ("scale is 0", lambda: ops.scan(Q, K, K, scale=0.0)),
    ],
    "scan_delta": [
        ("beta", lambda: ops.scan_delta(Q, K, K, BETA[..., :2])),
        ("not per channel", lambda: ops.scan_delta(Q, K, K, BETA, torch.zeros(1, 5, 4, 8))),
        ("k is torch.int64", lambda: ops.scan_delta(Q, K.long(), K, BETA)),
    ],
    "linear": [
        (r"x \(3, 32\)", lambda: ops.linear(X[:, :32], W)),
        (r"bias .* \(7,\)", lambda: ops.linear(X, W, torch.ones(7))),
    ],
    "gated_linear": [
        (r"x \(3, 32\)", lambda: ops.gated_linear(X[:, :32], W)),
        (r"weight \(7, 64\) .* halves", lambda: ops.gated_linear(X, W[:7])),
    ],
    "quantized_linear": [
        ("float32", lambda: ops.quantized_linear(X, W, SCALES)),
        (r"scales \(7, 2\)", lambda: ops.quantized_linear(X, CODES, SCALES[:7])),
        ("3 scales", lambda: ops.quantized_linear(X, CODES, torch.ones(8, 3))),
        ("of 2 bits", lambda: ops.quantized_linear(X, TILES, TILE_SCALES, bits=2, out_features=8)),
        ("500 rows", lambda: ops.quantized_linear(X, TILES, TILE_SCALES, out_features=500)),
        ("bias", lambda: ops.quantized_linear(X, CODES, SCALES, torch.ones(3))),
    ],
    "fp8_linear": [
        ("x is torch.float32", lambda: ops.fp8_linear(X, ONES, FP8, ONES)),
        (r"x_scales .* \(3,\)", lambda: ops.fp8_linear(FP8, ONES[:3], FP8, ONES)),
        ("float64", lambda: ops.fp8_linear(FP8, ONES, FP8, ONES.double())),
        ("64 columns", lambda: ops.fp8_linear(FP8, torch.ones(8, 1), FP8, ONES)),
        (r"\(8, 32\)", lambda: ops.fp8_linear(FP8[:, :32], ONES, FP8, ONES)),
        ("bias", lambda: ops.fp8_linear(FP8, ONES, FP8, ONES, torch.ones(3))),
    ],
    "input_codes": [
        ("kind is 'int4'", lambda: ops.input_codes(X, "int4")),
        (r"x \(3, 64\) .* groups of 48", lambda: ops.input_codes(X, "fp8", group_size=48)),
        (r"scale \(8,\)", lambda: ops.input_codes(X, "fp8", scale=ONES)),
    ],
    "sparse_linear": [
        (r"weight \(8, 64\)", lambda: ops.sparse_linear(X[:, :60], SPARSE)),
        (r"bias .* \(7,\)", lambda: ops.sparse_linear(X, SPARSE, torch.ones(7))),
    ],
    "choose": [("op is 'atend'", lambda: ops.choose("atend", Where()))],
    "grouped_linear": [
        (r"ends \(1,\)", lambda: ops.grouped_linear(X, EXPERTS, ENDS[:1])),
        (r"x \(3, 32\)", lambda: ops.grouped_linear(X[:, :32], EXPERTS, ENDS)),
        ("no gradient", lambda: ops.grouped_linear(X.clone().requires_grad_(), EXPERTS, ENDS, backend="triton")),
    ],
    "choose_experts": [
        (r"top_k 9", lambda: ops.choose_experts(X, W, 9)),
        (r"weight \(8, 64\)", lambda: ops.choose_experts(X[:, :60], W, 2)),
        (r"bias \(7,\)", lambda: ops.choose_experts(X, W, 2, bias=torch.ones(7))),
        ("score is 'max'", lambda: ops.choose_experts(X, W, 2, score="max")),  # type: ignore[arg-type]
    ],
    "expert_swiglu": [
        (r"gate_up has shape \(8, 64\)", lambda: ops.expert_swiglu(X, IDS, SHARES, ExpertWeights(W), DOWN)),
        ("torch.int8 with no scales", lambda: ops.expert_swiglu(X, IDS, SHARES, GATED, ExpertWeights(CODES[None]))),
        (
            r"scales \(1, 2, 7\)",
            lambda: ops.expert_swiglu(X, IDS, SHARES, GATED, ExpertWeights(CODES[None], torch.ones(1, 2, 7))),
        ),
        (r"ids torch.int64 \(2, 2\)", lambda: ops.expert_swiglu(X, IDS[:2], SHARES, GATED, DOWN)),
        ("rounding 'int8' does not fit dense", lambda: ops.expert_swiglu(X, IDS, SHARES, GATED, DOWN, rounding="int8")),
        (r"down \(2, 64, 4\)", lambda: ops.expert_swiglu(X, IDS, SHARES, GATED, ExpertWeights(EXPERTS.mT[..., :4]))),
    ],
    "linear_cross_entropy": [
        (r"targets torch.int64 \(2,\)", lambda: ops.linear_cross_entropy(X, W, KEYS[:2])),
        ("targets torch.float32", lambda: ops.linear_cross_entropy(X, W, KEYS.float())),
        ("'none'", lambda: ops.linear_cross_entropy(X, W, KEYS, reduction="none")),  # type: ignore[arg-type]
        ("chunk_tokens is 0", lambda: ops.linear_cross_entropy(X, W, KEYS, chunk_tokens=0)),
    ],
    "permute": [
        ("expert_ids torch.float32", lambda: ops.permute(X, IDS.float(), 2)),
        ("expert_ids are 5", lambda: ops.permute(X, IDS + 5, 2)),
    ],
    "unpermute": [(r"place \(2, 2\)", lambda: ops.unpermute(torch.zeros(6, 64), IDS[:2]))],
    "rms_norm": [
        ("weight has 7", lambda: ops.rms_norm(X, torch.ones(7), 1e-5)),
        ("residual .*float64", lambda: ops.rms_norm(X, torch.ones(64), 1e-5, X.double())),
        ("'int4'", lambda: ops.rms_norm(X, torch.ones(64), 1e-5, quantize="int4")),  # type: ignore[arg-type]
    ],
    "rope": [
        ("odd", lambda: ops.rope(torch.zeros(3, 2, 7), ANGLES, ANGLES)),
        (r"cos \(3, 1, 3\)", lambda: ops.rope(torch.zeros(3, 2, 8), ANGLES[..., :3], ANGLES[..., :3])),
    ],
    "rope_write": [
        ("v .* do not fit", lambda: ops.rope_write(**turned(v=torch.zeros(3, 2, 6)))),
        (r"sin \(3, 1, 3\)", lambda: ops.rope_write(**turned(sin=ANGLES[..., :3]))),
        ("k_norm is missing", lambda: ops.rope_write(**turned(q_norm=torch.ones(8)))),
        (r"q_norm \(6,\) .* \(3, 4, 8\)", lambda: ops.rope_write(**turned(q_norm=torch.ones(6), k_norm=torch.ones(8)))),
    ],
    "prune_compensated": [
        (r"ratio \(2, 2\)", lambda: ops.prune_compensated(X, torch.eye(2), Pruning(torch.ones(3)))),
        (r"prune.weights \(4,\)", lambda: ops.prune_compensated(X, torch.eye(3), Pruning(torch.ones(4)))),
        ("groups of 4", lambda: ops.prune_compensated(X, torch.eye(3), Pruning(torch.ones(3), pattern=Pattern(2, 4)))),
    ],
    "round_compensated": [
        (r"steps \(3, 7\)", lambda: ops.round_compensated(X, X[:, :7], torch.eye(3), -8, 7)),
        (r"ratio \(2, 2\)", lambda: ops.round_compensated(X, X, torch.eye(2), -8, 7)),
    ],
    "fp8_trained_linear": [
        (r"x \(3, 64\) and weight \(8, 32\) differ in columns", lambda: ops.fp8_trained_linear(X, W[:, :32])),
        ("recipe is 'rows'", lambda: ops.fp8_trained_linear(X, W, recipe="rows")),
        ("3 rows, 8 output and 64 input features", lambda: ops.fp8_trained_linear(X, W)),
    ],
    "adamw_step": [
        ("grad .*int64", lambda: ops.adamw_step(X, X[:, :7].long(), X, X, NUMBERS)),
        ("weight torch.float64", lambda: ops.adamw_step(X.double(), X, X, X, NUMBERS)),
        (r"factor is torch.float64 \(\)", lambda: ops.adamw_step(X, X, X, X, NUMBERS, factor=torch.ones(()).double())),
    ],
    "widen": [(r"source .*\(3, 7\)", lambda: ops.widen(X, X[:, :7]))],
    "sample": [
        (r"keys \(2,\)", lambda: ops.sample(X, 1.0, keys=KEYS[:2])),
        ("keys torch.int32", lambda: ops.sample(X, 1.0, keys=KEYS.int())),
        ("temperature is .*-1.0", lambda: ops.sample(X, -1.0, keys=KEYS)),
        ("top_p has 2 numbers for 3", lambda: ops.sample(X, 1.0, top_p=[0.5, 0.5], keys=KEYS)),
    ],
    "penalize": [
        (r"logits \(3, 64\)", lambda: ops.penalize(X, COUNTS[:, :9].contiguous(), KEYS, *THREE)),
        ("counts are torch.int64", lambda: ops.penalize(X, COUNTS.long(), KEYS, *THREE)),
        (r"rows are torch.int64 \(2,\)", lambda: ops.penalize(X, COUNTS, KEYS[:2], *THREE)),
        ("frequency is torch.float64", lambda: ops.penalize(X, COUNTS, KEYS, THREE[0], THREE[0].double(), THREE[0])),
    ],
    "count_tokens": [
        ("tokens are torch.int32", lambda: ops.count_tokens(COUNTS, KEYS, KEYS.int())),
        (r"counts are torch.int32 \(64,\)", lambda: ops.count_tokens(COUNTS[0], KEYS, KEYS)),
    ],
    "token_logprobs": [
        ("tokens torch.int32", lambda: ops.token_logprobs(X, KEYS.int())),
        ("top is 33", lambda: ops.token_logprobs(X, KEYS, 33)),
    ],
    "swiglu": [(r"gate_up \(3, 7\)", lambda: ops.swiglu(X[:, :7]))],
    "geglu": [(r"gate_up \(3, 7\)", lambda: ops.geglu(X[:, :7]))],
    "clamped_swiglu": [
        (r"gate_up \(3, 7\)", lambda: ops.clamped_swiglu(X[:, :7])),
        ("limit is 0", lambda: ops.clamped_swiglu(X, 0)),
    ],
}
CASES = [(name, word, call) for name, cases in MISTAKES.items() for word, call in cases]


def test_every_public_function_has_its_mistakes() -> None:
    assert set(MISTAKES) == set(ops.__all__)
    assert ops.attend_paged(**paged()).shape == (2, 4, 8) and ops.attend_latent(**latent()).shape == (2, 4, 6)
    ops.write_kv(**{name: one.clone() for name, one in written().items()})  # what the mistakes change fits by itself
    ops.rope_write(**{name: one.clone() for name, one in turned().items()})


@pytest.mark.parametrize(("name", "word", "call"), CASES, ids=[f"{name}-{word}" for name, word, _ in CASES])
def test_a_mistake_is_named_with_a_way_out(name: str, word: str, call: Callable[[], Any]) -> None:
    with pytest.raises(HoneError, match=word) as caught:
        call()
    assert caught.value.fix.strip() and caught.value.fix not in caught.value.what
    assert "\n" not in caught.value.what + caught.value.fix


@pytest.mark.parametrize("name", sorted(set(BACKENDS) & set(ops.__all__)))
def test_a_backend_that_an_op_has_not(name: str) -> None:
    right: dict[str, Callable[[], Any]] = {
        "attend": lambda: ops.attend(Q, K, K, backend="tritno"),
        "attend_backward": lambda: ops.attend_backward(Q, K, K, Q, LSE, Q, backend="tritno"),
        "attend_paged": lambda: ops.attend_paged(**paged(backend="tritno")),
        "attend_latent": lambda: ops.attend_latent(**latent(backend="tritno")),
        "attend_shared": lambda: ops.attend_shared(**paged(shared=PLACES.int(), backend="tritno")),
        "scan": lambda: ops.scan(Q, K, K, backend="tritno"),
        "dequantize_nf4": lambda: ops.dequantize_nf4(NIBBLES, SCALES, torch.float32, backend="tritno"),
        "dora_linear": lambda: ops.dora_linear(
            X, lambda dtype: W, None, W[:, 0], [W[:2]], [W[:, :2]], [W[:, 0]], scales=(1.0,), backend="tritno"
        ),
        "linear": lambda: ops.linear(X, W, backend="tritno"),
        "gated_linear": lambda: ops.gated_linear(X, W, backend="tritno"),
        "quantized_linear": lambda: ops.quantized_linear(X, CODES, SCALES, backend="tritno"),
        "fp8_linear": lambda: ops.fp8_linear(FP8, ONES, FP8, ONES, backend="tritno"),
        "lora_shrink": lambda: ops.lora_shrink(X, W.expand(2, 8, 64), PLACES - 1, RANKS, backend="tritno"),
        "lora_expand": lambda: ops.lora_expand(**expanded(backend="tritno")),
        "slotted_linear": lambda: ops.slotted_linear(**slotted(backend="tritno")),
        "sparse_linear": lambda: ops.sparse_linear(X, SPARSE, backend="tritno"),
        "input_codes": lambda: ops.input_codes(X, "fp8", backend="tritno"),
        "rms_norm": lambda: ops.rms_norm(X, torch.ones(64), 1e-5, backend="tritno"),
        "rope": lambda: ops.rope(torch.zeros(3, 2, 8), ANGLES, ANGLES, backend="tritno"),
        "rope_write": lambda: ops.rope_write(
            *torch.zeros(3, 3, 1, 8),
            ANGLES,
            ANGLES,
            *torch.zeros(2, 2, 1, 4, 8),
            *torch.zeros(2, 3).long(),
            backend="tritno",
        ),
        "swiglu": lambda: ops.swiglu(X, backend="tritno"),
        "geglu": lambda: ops.geglu(X, backend="tritno"),
        "clamped_swiglu": lambda: ops.clamped_swiglu(X, backend="tritno"),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(X, W, KEYS, backend="tritno"),
        "grouped_linear": lambda: ops.grouped_linear(X, EXPERTS, ENDS, backend="tritno"),
        "permute": lambda: ops.permute(X, IDS, 2, backend="tritno"),
        "choose_experts": lambda: ops.choose_experts(X, W, 2, backend="tritno"),
        "expert_swiglu": lambda: ops.expert_swiglu(X, IDS, SHARES, GATED, DOWN, backend="tritno"),
        "prune_compensated": lambda: ops.prune_compensated(X, torch.eye(3), Pruning(torch.ones(3)), backend="tritno"),
        "round_compensated": lambda: ops.round_compensated(X, X, torch.eye(3), -8, 7, backend="tritno"),
        "adamw_step": lambda: ops.adamw_step(X, X, X, X, NUMBERS, backend="tritno"),
        "widen": lambda: ops.widen(X, X, backend="tritno"),
        "sample": lambda: ops.sample(X, 1.0, keys=KEYS, backend="tritno"),
        "penalize": lambda: ops.penalize(X, COUNTS, KEYS, *THREE, backend="tritno"),
        "count_tokens": lambda: ops.count_tokens(COUNTS, KEYS, KEYS, backend="tritno"),
        "token_logprobs": lambda: ops.token_logprobs(X, KEYS, backend="tritno"),
        "apply_token_bitmask": lambda: ops.apply_token_bitmask(X, MASKS, PLACES, backend="tritno"),
    }
    with pytest.raises(HoneError, match="backend is 'tritno'") as caught:
        right[name]()
    assert caught.value.fix


def raised(source: str) -> list[tuple[int, str, bool]]:
    """(line, name, whether `fix` is given) of every `raise` of a new error."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc
            kind = call.func if isinstance(call, ast.Call) else call
            fixed = isinstance(call, ast.Call) and any(word.arg == "fix" for word in call.keywords)
            found.append((node.lineno, ast.unparse(kind), fixed))
    return found


def test_the_walk_sees_plain_errors() -> None:
    source = "if x:\n    raise ValueError('no')\nraise TypeError\nraise SpecError('a', fix='b')\n"
    assert sorted(raised(source)) == [(2, "ValueError", False), (3, "TypeError", False), (4, "SpecError", True)]
    assert {"SpecError", "MachineError"} <= OURS and "ValueError" not in OURS


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(SOURCES[0].parent)) for path in SOURCES])
def test_ops_raise_errors_with_a_way_out_only(path: Path) -> None:
    allowed = {"AttributeError"} if path == Path(ops.__file__) else set()  # what Python asks of a module's __getattr__
    wrong = [
        f"{path.name}:{line}: raise {name}"
        for line, name, fixed in raised(path.read_text(encoding="utf8"))
        if name not in allowed and not (name in OURS and fixed)
    ]
    assert not wrong, "\n".join(wrong)
