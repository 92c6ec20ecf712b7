"""What a merge is asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hone.base.spec import Spec


class MergeSpec(Spec):
    """To which weights the adapter is added, and how the sum is stored."""

    merge: Literal["as_trained", "onto_original"] = Field(
        "as_trained",
        description="as_trained: to the weights beside which it was trained, of codes their values, which is the function that was trained; "
        "onto_original: to those of the unquantized model 'original', a better base but not that function.",
    )
    original: str | None = Field(None, description="With onto_original, the folder of that model.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="Dtype of the merged weights; empty: that of the model. Never codes, whose rounding erases an adapter.",
    )

    @model_validator(mode="after")
    def _one_base(self) -> MergeSpec:
        if (self.merge == "onto_original") != (self.original is not None):
            raise ValueError("original is the model of merge onto_original: give both, or neither")
        return self
