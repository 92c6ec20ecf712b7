"""`hone cost money checkpoints`: how often to save, by Young and Daly, and what failures cost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from pydantic import Field

from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.money.failures import daly_s, efficiency, from_trace, read_gaps, simulate

YOUNG = "Young 1974, CACM 17(9)"
DALY = "Daly 2006, FGCS 22(3)"
KUNSCH = "Kunsch 1989, Annals of Statistics 17(3)"
DRAWN = 51
"""Jobs that run against failures drawn from a record."""


class Checkpoints(Calculator):
    """The interval between checkpoints that loses the least time, and the share of time that is work."""

    save_s: float = Field(
        30.0,
        gt=0,
        description="Seconds in which training stands still for a save; of an asynchronous save the stall alone.",
    )
    restart_s: float = Field(300.0, ge=0, description="Seconds from a failure until steps run again.")
    mtbf_h: float | None = Field(
        None, gt=0, description="Hours between failures of the whole job; empty: from node_mtbf_h and nodes."
    )
    node_mtbf_h: float = Field(
        50_677.0,
        gt=0,
        description="Hours between failures of one node or GPU; 50,677 is Llama 3's: 419 in 54 days on 16,384.",
    )
    nodes: int = Field(16_384, ge=1, description="Nodes or GPUs of the job, any of which stops it.")
    failures: str = Field(
        "",
        description="Text file of recorded hours between failures, one a line: gives mtbf_h, and jobs that are played against "
        "failures drawn from it in blocks, so that clusters stay clusters.",
    )
    work_h: float = Field(1296.0, gt=0, description="Hours of work without any failure or save.")
    interval_s: float | None = Field(None, gt=0, description="Interval to judge; empty is Daly's.")
    stall_s: float | None = Field(None, gt=0, description="Stall of an asynchronous save, to compare with save_s.")
    usd_per_hour: float | None = Field(None, gt=0, description="Price of an hour of the whole job.")

    def sheet(self) -> Sheet:
        """Intervals of Young and Daly, wall time, and the same with an asynchronous save."""
        found = Sheet("checkpoints against failures")
        gaps = read_gaps(Path(self.failures)) if self.failures else []
        if gaps and self.mtbf_h is None:
            mtbf = 3600 * found.add(
                "time between failures of the job", "hours / failures", "h", hours=sum(gaps) / 3600, failures=len(gaps)
            )
        elif self.mtbf_h is None:
            mtbf = 3600 * found.add(
                "time between failures of the job", "node_h / nodes", "h", node_h=self.node_mtbf_h, nodes=self.nodes
            )
        else:
            mtbf = 3600 * self.mtbf_h
        self._with(found, self.save_s, mtbf, "")
        if gaps:
            self._played(found, gaps)
        if self.stall_s is not None:
            self._with(found, self.stall_s, mtbf, "asynchronous: ")
            found.add(
                "the asynchronous save is faster by", "1 - a / s", "%",
                a=found["asynchronous: wall time"], s=found["wall time"],
            )  # fmt: skip
        return found

    def _played(self, found: Sheet, gaps: list[float]) -> None:
        """Wall times of jobs against failures drawn from the recorded `gaps`, saving as often as the sheet says."""
        tau = self.interval_s or found["interval (Daly)"]
        horizon = 3 * found["wall time"] + 100 * sum(gaps) / len(gaps)
        jobs = (3600 * self.work_h, tau, self.save_s, self.restart_s)
        walls = [simulate(*jobs, from_trace(gaps, horizon, seed)).wall_s for seed in range(DRAWN)]
        for percent in (10, 50, 90):
            wall = float(np.percentile(walls, percent))
            name = f"wall time, {percent} % of {DRAWN} jobs with recorded failures take less"
            found.add(name, "played", "s", KUNSCH, played=wall)

    def _with(self, found: Sheet, save: float, mtbf: float, name: str) -> None:
        numbers = {"delta": save, "M": mtbf}
        young = found.add(f"{name}interval (Young)", "sqrt(2 * delta * M)", "s", YOUNG, **numbers)
        daly = found.add(
            f"{name}interval (Daly)", "young * (1 + sqrt(delta / (2 * M)) / 3 + delta / (2 * M) / 9) - delta", "s", DALY,
            value=daly_s(save, mtbf), young=young, **numbers,
        )  # fmt: skip
        tau = self.interval_s or daly
        wall = found.add(
            f"{name}wall time", "3600 * W * M * e ** (R / M) * (e ** ((tau + delta) / M) - 1) / tau", "s", DALY,
            W=self.work_h, R=self.restart_s, e=math.e, tau=tau, **numbers,
        )  # fmt: skip
        share = found.add(f"{name}share of time that is work", "3600 * W / wall", "%", W=self.work_h, wall=wall)
        assert math.isclose(share, efficiency(tau, save, self.restart_s, mtbf), rel_tol=1e-9)
        if self.usd_per_hour is not None:
            found.add(
                f"{name}price of failures and saves", "(wall / 3600 - W) * usd", "$",
                wall=wall, W=self.work_h, usd=self.usd_per_hour,
            )  # fmt: skip
