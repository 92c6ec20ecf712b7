"""Compression: smaller and faster models, one decoder layer at a time, in formats that others load."""

from __future__ import annotations

from hone.base.table import Table

QUANTIZERS = Table(
    "quantizer",
    {
        "rtn": "hone.compress.quantizers.rtn:RoundToNearest",
        "hqq": "hone.compress.quantizers.hqq:HQQ",
        "gptq": "hone.compress.quantizers.gptq:GPTQ",
        "gptaq": "hone.compress.quantizers.gptaq:GPTAQ",
        "sorted_groups": "hone.compress.quantizers.sorted_groups:SortedGroups",
        "autoround": "hone.compress.quantizers.autoround:AutoRound",
        "block_int8": "hone.compress.quantizers.block_int8:BlockInt8",
        "fp8": "hone.compress.quantizers.fp8:FP8",
        "nf4": "hone.compress.quantizers.nf4:NF4",
        "fp4": "hone.compress.quantizers.nf4:FP4",
        "llm_int8": "hone.compress.quantizers.llm_int8:LLMInt8",
        "nvfp4": "hone.compress.quantizers.nvfp4:NVFP4",
        "mxfp4": "hone.compress.quantizers.microscaling:MXFP4",
        "mxfp8": "hone.compress.quantizers.microscaling:MXFP8",
    },
)

PRUNERS = Table(
    "pruner",
    {
        "magnitude": "hone.compress.pruners.magnitude:Magnitude",
        "wanda": "hone.compress.pruners.wanda:Wanda",
        "random": "hone.compress.pruners.random:RandomPruning",
        "sparsegpt": "hone.compress.pruners.sparsegpt:SparseGPT",
    },
)


TRANSFORMS = Table(
    "transform",
    {
        "awq": "hone.compress.transforms.awq:AWQ",
        "smoothquant": "hone.compress.transforms.smoothquant:SmoothQuant",
        "cross_layer_equalization": "hone.compress.transforms.equalization:CrossLayerEqualization",
        "rotation": "hone.compress.transforms.rotation:Rotation",
    },
)


ALLOCATIONS = Table(
    "bit allocation",
    {
        "hessian": "hone.compress.allocations.hessian:HessianAllocation",
        "kl": "hone.compress.allocations.kl:KLAllocation",
        "fisher": "hone.compress.allocations.fisher:FisherAllocation",
        "pairs": "hone.compress.allocations.pairs:PairAllocation",
    },
)


STRUCTURED_PRUNERS = Table(
    "structured pruner",
    {
        "depth": "hone.compress.structured.depth:Depth",
        "width": "hone.compress.structured.width:Width",
        "experts": "hone.compress.structured.experts:Experts",
        "expert_merging": "hone.compress.structured.expert_merging:ExpertMerging",
    },
)


LOW_RANK = Table(
    "low rank",
    {
        "svd": "hone.compress.low_rank.svd:SVD",
        "asvd": "hone.compress.low_rank.asvd:ASVD",
        "eora": "hone.compress.low_rank.eora:EoRA",
        "loftq": "hone.compress.low_rank.loftq:LoftQ",
    },
)

CONVERSIONS = Table(
    "conversion",
    {
        "gqa": "hone.compress.conversions.gqa:GQA",
        "transmla": "hone.compress.conversions.transmla:TransMLA",
        "linearize": "hone.compress.conversions.linearize:Linearize",
        "extend_context": "hone.compress.conversions.extend_context:ExtendContext",
    },
)

KV_CACHES = Table("KV cache quantizer", {"kv_cache": "hone.compress.caches.kv_cache:KVCache"})


class Steps(Table):
    """Several slots combined in one table, for a list of steps from any of them."""

    def __init__(self, slot: str, *tables: Table) -> None:
        self.slot = slot
        self.tables = tables
        self.elsewhere = {name: way for table in tables for name, way in table.elsewhere.items()}

    @property
    def rows(self) -> dict[str, str]:  # type: ignore[override]
        return {name: row for table in self.tables for name, row in table.rows.items()}

    def slot_of(self, kind: str) -> str:
        """The slot that contains `kind`; for a class of another package the one from whose base it derives."""
        for table in self.tables:
            if kind in table.rows:
                return table.slot
        foreign = self[kind]
        return next(table.slot for table in self.tables if issubclass(foreign, table.shared_bases()[0]))

    def installed(self) -> dict[str, str]:
        """As `Table.installed`, of all slots."""
        return {name: row for table in self.tables for name, row in table.installed().items()}


STEPS = Steps("compression step", CONVERSIONS, STRUCTURED_PRUNERS, TRANSFORMS, PRUNERS, QUANTIZERS, LOW_RANK, KV_CACHES)
