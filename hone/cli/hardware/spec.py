"""What `hone hardware` is asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.base.spec import Spec


class HardwareSpec(Spec):
    """Which rows of the catalogue are shown, and the decode by which accelerators are compared."""

    list: Literal["accelerators", "links", "prices", "grids", "cooling"] = Field(
        "accelerators", description="Rows to list."
    )
    target: str = Field(
        "", description="Say which number formats this family has, such as nvidia-hopper, or this accelerator."
    )
    dtype: str = Field("bfloat16", description="Number format of the rates compared.")
    params: float = Field(8e9, gt=0, description="Weights of the model whose decode is compared.")
    active: float | None = Field(None, gt=0, description="Its weights that one token is multiplied with; empty: all.")
    bits: float = Field(16, gt=0, description="Bits of a weight.")
    batch: int = Field(1, ge=1, description="Sequences decoded at once.")
    kv_bytes: float = Field(0, ge=0, description="Bytes of one sequence's cache that a step reads.")
    hardware: str = Field(
        "", description="Rows of your own: a YAML file or a folder; empty: ~/.config/hone/hardware/*.yaml."
    )
