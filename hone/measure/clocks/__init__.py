"""Clocks and power limits of GPUs: read, held for a while, measured over several settings, and chosen by a policy."""

from hone.base.table import Table

CLOCKS = Table(
    "clock",
    {
        "fixed": "hone.measure.clocks.policies.fixed:Fixed",
        "max_slowdown": "hone.measure.clocks.policies.sweeping:MaxSlowdown",
        "zeus": "hone.measure.clocks.policies.sweeping:Zeus",
        "by_phase": "hone.measure.clocks.policies.by_phase:ByPhase",
        "thermal": "hone.measure.clocks.policies.thermal:Thermal",
    },
)
