"""How an engine is set up: cache size, batching, budget, drafter. Read by the CLI, so free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.serve import DRAFTERS


class EngineSpec(Spec):
    """Sizes and policies of an `Engine`."""

    page_size: int = Field(16, ge=1, le=1024, description="Tokens in a page of the KV cache.")
    num_pages: int | None = Field(None, ge=1, description="Pages of the KV cache; empty to size it by bytes.")
    cache_bytes: int | None = Field(None, ge=1, description="Bytes of the KV cache; empty to size it by free memory.")
    memory_fraction: float | None = Field(
        None, gt=0, le=1, description="Part of the free memory for the KV cache (0.9 on a GPU, 0.3 on a CPU), at most "
        "what max_rows longest sequences fill."
    )  # fmt: skip
    max_rows: int = Field(64, ge=1, description="Requests that run at once.")
    token_budget: int = Field(1024, ge=1, description="Most tokens of one step, decode and prefill together.")
    prefix_cache: bool = Field(True, description="Share the pages of equal prompt beginnings.")
    batching: Literal["continuous", "static"] = Field("continuous", description="static: no one joins a running batch.")
    max_waiting: int = Field(4096, ge=1, description="Requests that may wait; more are turned away.")
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt plus output; empty for the model's own.")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of a step; empty for one in small steps, where threads wait more than work."
    )  # fmt: skip
    drafter: Annotated[Technique, Choice(DRAFTERS)] | None = Field(None, description="Who guesses tokens ahead.")

    @model_validator(mode="after")
    def _rows_fit_the_budget(self) -> EngineSpec:
        if self.token_budget < self.max_rows:
            raise ValueError(
                f"token_budget {self.token_budget} is less than max_rows {self.max_rows}: rows would starve"
            )
        return self
