"""The spec of an engine: dtypes, sizes, batching, drafter. Read by the CLI, so it never imports torch.

Fields have vLLM's names where vLLM has the field.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.serve import DRAFTERS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineSpec(Spec):
    """Dtypes, sizes and policies of an `Engine`. Empty sizes are derived from the device."""

    renamed: ClassVar[dict[str, str | None]] = {
        "page_size": "block_size",
        "cache_bytes": "kv_cache_memory_bytes",
        "memory_fraction": "gpu_memory_utilization",
        "max_rows": "max_num_seqs",
        "token_budget": "max_num_batched_tokens",
        "prefix_cache": "enable_prefix_caching",
    }

    dtype: Dtype = Field("auto", description="Number format of the weights; auto keeps the folder's.")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = Field(
        "auto", description="Number format of the KV cache; auto is that of the weights."
    )
    sparsity: Literal["none", "2:4", "auto"] = Field(
        "none",
        description="2:4: linears with two zeros in every four weights run compressed, on a GPU; auto: those that are faster "
        "so for max_num_seqs sequences, timed when the engine starts.",
    )
    draft: str | None = Field(None, description="Folder of the draft model, for speculative decoding.")
    drafter: Annotated[Technique, Choice(DRAFTERS)] | None = Field(
        None, description="Technique that drafts tokens ahead; empty is draft_model with a draft model, else none."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Most sequences of one step; empty for the device's default."
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Most tokens of one step, decode and prefill together; empty for the device's default."
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt plus output; empty for the model's own.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in a page (block) of the KV cache.")
    num_pages: int | None = Field(None, ge=1, description="Pages of the KV cache; empty to size it by bytes.")
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Bytes of the KV cache; empty to size it by gpu_memory_utilization."
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Part of a GPU's memory for weights, activations and cache together (0.9); on a CPU the "
        "part of the free memory for the cache (0.3). The cache takes at most what max_num_seqs longest sequences fill."
    )  # fmt: skip
    enable_prefix_caching: bool = Field(True, description="Share the pages of equal prompt prefixes.")
    batching: Literal["continuous", "static"] = Field(
        "continuous", description="static: no request joins a running batch."
    )
    max_waiting: int = Field(4096, ge=1, description="Requests that may wait; more are rejected.")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of a step; empty for one in small steps, where synchronization costs more than it saves."
    )  # fmt: skip

    @model_validator(mode="after")
    def _possible(self) -> EngineSpec:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}: some sequences would never be scheduled"
            )
        if self.kv_cache_dtype in ("fp8", "int8"):
            raise SpecError(
                f"engine.kv_cache_dtype is {self.kv_cache_dtype}: the engine does not serve from 8-bit pages yet",
                fix="use auto, float32, bfloat16 or float16",
            )
        return self
