"""Serving: paged cache, one scheduler for prefill and decode, exact speculation, and an OpenAI-compatible HTTP server."""

from hone.base.table import Table

DRAFTERS = Table(
    "drafter",
    {
        "draft_model": "hone.serve.speculation.draft_model:DraftModel",
        "prompt_lookup": "hone.serve.speculation.prompt_lookup:PromptLookup",
        "medusa": "hone.serve.speculation.medusa:Medusa",
        "eagle3": "hone.serve.speculation.eagle3:Eagle3",
    },
)

EVICTIONS = Table(
    "eviction",
    {
        "lru": "hone.serve.eviction.lru:LRU",
        "lfu": "hone.serve.eviction.lfu:LFU",
        "slru": "hone.serve.eviction.slru:SLRU",
        "fifo": "hone.serve.eviction.fifo:FIFO",
        "priority_duration": "hone.serve.eviction.priority_duration:PriorityDuration",
    },
)

KV_POLICIES = Table(
    "KV policy",
    {
        "full": "hone.serve.kv_policies.full:Full",
        "window": "hone.serve.kv_policies.window:Window",
        "streaming_llm": "hone.serve.kv_policies.streaming_llm:StreamingLLM",
        "h2o": "hone.serve.kv_policies.h2o:H2O",
        "snapkv": "hone.serve.kv_policies.snapkv:SnapKV",
    },
)

AUTOSCALERS = Table(
    "autoscaler",
    {
        "doubling": "hone.serve.replicas.autoscale.doubling:Doubling",
        "target_tracking": "hone.serve.replicas.autoscale.target_tracking:TargetTracking",
        "panic_window": "hone.serve.replicas.autoscale.panic_window:PanicWindow",
        "predictive": "hone.serve.replicas.autoscale.predictive:Predictive",
        "hysteresis": "hone.serve.replicas.autoscale.hysteresis:Hysteresis",
    },
)
