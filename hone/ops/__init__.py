"""Numeric operations: one folder per operation; `hone.ops` exports the public functions of each folder's `api.py`.

The functions are imported eagerly: three have the name of their folder, and a later import of the folder would replace
them. No kernel is imported with them.
"""

from hone.ops.activation.api import clamped_swiglu, geglu, swiglu
from hone.ops.attention.api import attend, attend_backward, merge
from hone.ops.dispatch import choose
from hone.ops.fp8.api import fp8_trained_linear
from hone.ops.linear.api import fp8_linear, gated_linear, linear, quantized_linear
from hone.ops.linear.codes import input_codes
from hone.ops.linear.sparse import sparse_linear
from hone.ops.lora.api import frozen_linear, lora_linear
from hone.ops.lora.dora import dora_linear
from hone.ops.lora.slots import lora_expand, lora_shrink, slotted_linear
from hone.ops.loss.api import linear_cross_entropy
from hone.ops.moe.api import grouped_linear, permute, unpermute
from hone.ops.moe.experts import choose_experts, expert_swiglu
from hone.ops.nf4.api import dequantize_nf4
from hone.ops.norm.api import rms_norm
from hone.ops.paged.api import attend_latent, attend_paged, quantize_kv, write_kv
from hone.ops.paged.shared import attend_shared
from hone.ops.rope.api import rope, rope_write
from hone.ops.rounding.api import prune_compensated, round_compensated
from hone.ops.sample.api import sample
from hone.ops.sample.bitmask import apply_token_bitmask
from hone.ops.sample.logprobs import token_logprobs
from hone.ops.sample.penalties import count_tokens, penalize
from hone.ops.scan.api import scan, scan_delta
from hone.ops.update.api import adamw_step, widen

__all__ = [
    "adamw_step",
    "apply_token_bitmask",
    "attend",
    "attend_backward",
    "attend_latent",
    "attend_paged",
    "attend_shared",
    "choose",
    "choose_experts",
    "clamped_swiglu",
    "count_tokens",
    "dequantize_nf4",
    "dora_linear",
    "expert_swiglu",
    "fp8_linear",
    "fp8_trained_linear",
    "frozen_linear",
    "gated_linear",
    "geglu",
    "grouped_linear",
    "input_codes",
    "linear",
    "linear_cross_entropy",
    "lora_expand",
    "lora_linear",
    "lora_shrink",
    "merge",
    "penalize",
    "permute",
    "prune_compensated",
    "quantize_kv",
    "quantized_linear",
    "rms_norm",
    "rope",
    "rope_write",
    "round_compensated",
    "sample",
    "scan",
    "scan_delta",
    "slotted_linear",
    "sparse_linear",
    "swiglu",
    "token_logprobs",
    "unpermute",
    "widen",
    "write_kv",
]
