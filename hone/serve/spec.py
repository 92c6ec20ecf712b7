"""The spec of an engine: dtypes, sizes, batching, drafter. Read by the CLI, so it never imports torch.

Fields have vLLM's names where vLLM has the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hone.base.figure import byte_count
from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.serve import DRAFTERS, EVICTIONS, KV_POLICIES
from hone.serve.adapters.spec import LoRASpec
from hone.serve.kv_policies.policy import check_combination

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EplbConfig(Spec):
    """How experts are placed on ranks. Fields have vLLM's names."""

    num_redundant_experts: int = Field(
        0,
        ge=0,
        description="Copies of busy experts in every layer; experts and copies are divided evenly among the ranks.",
    )
    step_interval: int | None = Field(
        None, ge=1, description="Steps between two placements by the loads counted meanwhile; empty: the engine places when it is asked to."
    )  # fmt: skip
    loads: str | None = Field(
        None, description="File of loads for the first placement: a training's steps.jsonl, or JSON {layer: [tokens of each expert]}."
    )  # fmt: skip


class ExpertOffload(Spec):
    """Experts whose weights are in host memory, with a cache of some on the device."""

    num_cached_experts: int | None = Field(
        None, ge=1, description="Experts of each layer whose weights are on the device; all are in pinned host memory. Empty: none are, all "
        "stay on the device."
    )  # fmt: skip
    eviction: Literal["lru", "lfu"] = Field(
        "lru", description="Which expert leaves the device: the one used longest ago, or visited least often."
    )
    prefetch: Literal["router", "none"] = Field(
        "router", description="router: while a layer computes, the experts are copied that the next layer's router names for its input."
    )  # fmt: skip


class EngineSpec(Spec):
    """Dtypes, sizes and policies of an `Engine`. Empty sizes are derived from the device."""

    dtype: Dtype = Field("auto", description="Number format of the weights; auto keeps the folder's.")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights in place of the folder's, which may then have only a config.json; for measuring."
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"] = Field(
        "auto",
        description="Number format of the KV cache; auto is that of the weights, or of the scales that the folder has for it. fp8 "
        "(fp8_e4m3) and int8 have the folder's scales, or one for each token and head.",
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
    block_size: int = Field(
        0, ge=0, le=1024, description="Tokens in a page (block) of the KV cache; 0: 64 on a GPU, 16 on a CPU."
    )
    num_pages: int | None = Field(None, ge=1, description="Pages of the KV cache; empty to size it by bytes.")
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Bytes of the KV cache; empty to size it by gpu_memory_utilization."
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Part of a GPU's memory for weights, activations and cache together (0.9); on a CPU the "
        "part of the free memory for the cache (0.3). The cache takes at most what max_num_seqs longest sequences fill."
    )  # fmt: skip
    gpu_memory: str | None = Field(
        None, description="Most memory of the GPU for weights, activations and cache together (20GiB, 20GB, 80%, bytes): layers that "
        "do not fit stay in pinned host memory and are copied in every step. Empty: all layers stay on the device."
    )  # fmt: skip
    expert_offload: ExpertOffload = Field(ExpertOffload(), description="Experts in host memory.")
    enable_prefix_caching: bool = Field(True, description="Share the pages of equal prompt prefixes.")
    eviction: Annotated[Technique, Choice(EVICTIONS)] | None = Field(
        None, description="Which cached pages are given out first when no other is free; empty is lru."
    )
    kv_policy: Annotated[Technique, Choice(KV_POLICIES)] | None = Field(
        None, description="Which of a sequence's own keys and values stay; empty is full."
    )
    lora: LoRASpec = Field(LoRASpec(), description="LoRA adapters over the model, many at once.")
    batching: Literal["continuous", "dynamic", "static"] = Field(
        "continuous",
        description="Static, dynamic: no request joins a running batch; dynamic waits up to max_delay_s to fill it.",
    )
    max_delay_s: float = Field(
        0.05,
        ge=0,
        description="Seconds that dynamic batching waits for more requests, from the oldest one's arrival on.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Launch a step before the tokens of the last one are read; empty: on a GPU without a drafter.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Processes that share every layer, one a GPU: some heads and columns each."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, description="Stages that the layers are divided into, one after another."
    )
    enable_expert_parallel: bool = Field(
        False, description="Tensor-parallel ranks divide experts whole, each its own, and not every expert's width."
    )
    enable_eplb: bool = Field(
        False, description="Count how many tokens ask for each expert, and place experts on ranks by it (eplb_config)."
    )
    eplb_config: EplbConfig = Field(EplbConfig(), description="Placement of experts, with enable_eplb.")
    distributed_timeout_seconds: int = Field(
        120, ge=1, description="With several processes: seconds after which a step, or a process that is silent, counts as hanging."
    )  # fmt: skip
    max_waiting: int = Field(4096, ge=1, description="Requests that may wait; more are rejected.")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of a step; empty for one in small steps, where synchronization costs more than it saves."
    )  # fmt: skip

    @field_validator("gpu_memory", mode="before")
    @classmethod
    def _amount(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if isinstance(text, str) and not byte_count(text, 1e12):
            raise ValueError(f"'{text}' is no memory at all")
        return text

    @model_validator(mode="after")
    def _possible(self) -> EngineSpec:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}: some sequences would never be scheduled"
            )
        check_combination(self)
        if self.gpu_memory is not None:
            self._check_gpu_memory()
        if self.lora.max_loras is not None:
            self._check_lora()
        if self.expert_offload.num_cached_experts is not None:
            if self.gpu_memory is not None or self.num_ranks > 1 or self.sparsity != "none":
                raise ValueError(
                    "expert_offload keeps the experts of a model on one GPU in host memory: leave engine.gpu_memory, several ranks and "
                    "engine.sparsity out"
                )
        elif self.expert_offload != ExpertOffload():
            raise ValueError("expert_offload has no effect without expert_offload.num_cached_experts")
        if self.async_scheduling and (self.drafter is not None or self.draft is not None):
            raise ValueError("async_scheduling and a drafter exclude each other: guesses follow tokens that are known")
        if self.num_ranks > 1 and self.draft is not None:
            raise ValueError("a draft model does not run on several ranks yet: leave engine.draft out")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("enable_expert_parallel divides experts among ranks: set engine.tensor_parallel_size")
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError("enable_eplb places the experts of several ranks: set engine.enable_expert_parallel")
        if self.eplb_config != EplbConfig() and not self.enable_eplb:
            raise ValueError("eplb_config has no effect without enable_eplb")
        if self.pipeline_parallel_size > 1 and (self.drafter is not None or self.async_scheduling):
            raise ValueError(
                "pipeline_parallel_size fills its stages with steps whose tokens are known: leave engine.drafter and "
                "engine.async_scheduling out"
            )
        return self

    def _check_lora(self) -> None:
        streams = self.gpu_memory is not None or self.expert_offload.num_cached_experts is not None
        for other, given in (
            ("several ranks (tensor_parallel_size, pipeline_parallel_size)", self.num_ranks > 1),
            ("weights in host memory (gpu_memory, expert_offload)", streams),
            ("kv_policy h2o and snapkv", self.kv_policy is not None and self.kv_policy.kind in ("h2o", "snapkv")),
        ):
            if given:
                raise ValueError(f"lora.max_loras and {other} exclude each other so far: leave one of them out")

    def _check_gpu_memory(self) -> None:
        if self.gpu_memory_utilization is not None:
            raise ValueError("gpu_memory and gpu_memory_utilization are two limits of one memory: give one of them")
        if self.num_ranks > 1:
            raise ValueError(
                "gpu_memory is for one GPU: several ranks divide the layers and keep all of them on their devices"
            )
        if self.draft is not None or (self.drafter is not None and "draft" in self.drafter.needs):
            raise ValueError(
                "gpu_memory and a draft model exclude each other so far: use engine.drafter prompt_lookup, or none"
            )
        if self.sparsity != "none":
            raise ValueError(
                "gpu_memory streams dense and quantized weights, not those of engine.sparsity: leave one of them out"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
