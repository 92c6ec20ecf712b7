"""Compression: smaller and faster models, one decoder layer at a time, in formats that others load."""

from __future__ import annotations

from hone.base.table import Table

QUANTIZERS = Table(
    "quantizer",
    {
        "rtn": "hone.compress.quantizers.rtn:RoundToNearest",
        "gptq": "hone.compress.quantizers.gptq:GPTQ",
        "nvfp4": "hone.compress.quantizers.nvfp4:NVFP4",
        "mxfp4": "hone.compress.quantizers.mxfp4:MXFP4",
        "mxfp8": "hone.compress.quantizers.mxfp8:MXFP8",
    },
)

PRUNERS = Table(
    "pruner",
    {
        "magnitude": "hone.compress.pruners.magnitude:Magnitude",
        "wanda": "hone.compress.pruners.wanda:Wanda",
    },
)


TRANSFORMS = Table(
    "transform",
    {
        "awq": "hone.compress.transforms.awq:AWQ",
        "smoothquant": "hone.compress.transforms.smoothquant:SmoothQuant",
        "cross_layer_equalization": "hone.compress.transforms.equalization:CrossLayerEqualization",
    },
)


ALLOCATIONS = Table(
    "bit allocation",
    {
        "hessian": "hone.compress.allocations.hessian:HessianAllocation",
        "kl": "hone.compress.allocations.kl:KLAllocation",
    },
)


class Steps(Table):
    """Several slots combined in one table, for a list of steps from any of them."""

    def __init__(self, slot: str, *tables: Table) -> None:
        self.slot = slot
        self.tables = tables

    @property
    def rows(self) -> dict[str, str]:  # type: ignore[override]
        return {name: row for table in self.tables for name, row in table.rows.items()}

    def slot_of(self, kind: str) -> str:
        """The slot that contains `kind`."""
        return next(table.slot for table in self.tables if kind in table.rows)


STEPS = Steps("compression step", TRANSFORMS, PRUNERS, QUANTIZERS)
