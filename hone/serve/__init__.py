"""Serving: paged cache, one scheduler for prefill and decode, exact speculation, and an OpenAI-compatible HTTP server."""

from hone.base.table import Table

DRAFTERS = Table(
    "drafter",
    {
        "draft_model": "hone.serve.speculation.draft_model:DraftModel",
        "prompt_lookup": "hone.serve.speculation.prompt_lookup:PromptLookup",
    },
)
