"""The machines of a goal as hone's estimates take them, with what is known of their price and power."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hone.base.errors import SpecError, did_you_mean
from hone.base.figure import byte_count
from hone.cost.catalogue.read import catalogue
from hone.cost.roofline import data_sheets
from hone.measure.calibration import AttentionRate, Bandwidth, Calibration, KernelRate, MatmulRate
from hone.measure.machine import Machine, describe
from hone.plan.search.goal import HERE, Goal, parts_of

KEPT_FREE = 0.05
"""Part of a device's memory that no configuration may use: the allocator's slack, buffers of collectives, the context."""

ATTENTION = 0.6
"""Part of a data sheet's arithmetic that fused attention reaches where nothing was measured: .60 of 989 TFLOP/s at 16,384 tokens
on an H200, forward (aiconfigurator's tables). Backward passes take 2.5 times as long (arXiv:2307.08691)."""

OP_S = 5e-6
"""Seconds to start a small operation on a GPU where nothing was measured."""

SPREAD = {"calibrated": 0.10, "assumed": 0.25}
"""Relative half-widths of predicted seconds: within 10 % on a calibrated machine, 25 % where a data sheet's rates are scaled
(hone's plans of published trainings: tests/cost/test_published.py)."""


@dataclass(frozen=True)
class Fleet:
    """`count` devices of one kind; `None` is unknown."""

    name: str
    count: int
    machine: Machine
    memory_bytes: float
    """Bytes of a device that a configuration may use."""
    price_per_hour: float | None
    """Dollars an hour of one device."""
    watts: float | None
    """Of one device at work."""
    grid_g_per_kwh: float | None
    rates: str
    """'calibrated', 'assumed' or 'bound': where the seconds come from."""

    @property
    def label(self) -> str:
        """As in a goal's `machines`."""
        return HERE if self.name == HERE else f"{self.count}x{self.name}"

    @property
    def on_gpu(self) -> bool:
        return self.machine.device.startswith("cuda")

    @property
    def served_dtype(self) -> str:
        """Of the weights of a model that is given by its sizes alone."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def spread(self) -> float | None:
        """Relative half-width of predicted seconds; None: they are bounds."""
        return SPREAD.get(self.rates)

    def dollars(self, hours: Any) -> Any:
        """Of so many hours of all devices (a number or an array); None where the price is unknown."""
        return None if self.price_per_hour is None else hours * self.count * self.price_per_hour

    def joules(self, hours: Any) -> Any:
        """Of so many hours of all devices; None where the power is unknown."""
        return None if self.watts is None else hours * 3600 * self.count * self.watts

    def grams(self, hours: Any) -> Any:
        """Of CO2; None where power or grid are unknown."""
        joules = self.joules(hours)
        return None if joules is None or self.grid_g_per_kwh is None else joules / 3.6e6 * self.grid_g_per_kwh

    def times(self, factor: int) -> Fleet:
        """As many times the devices."""
        machine = self.machine.model_copy(update={"num_ranks": self.count * factor, "planned": True})
        return replace(self, count=self.count * factor, machine=machine)


def fleet_of(text: str, goal: Goal, device: str = "cpu", machine: Machine | None = None) -> Fleet:
    """The machine `text` of `goal`; `machine` describes this one (None: it is asked). Raises SpecError for an unknown one."""
    if text == HERE:
        here = machine or describe(device)
        rates = "calibrated" if here.calibration is not None else "bound"
        watts = here.calibration.watts if here.calibration is not None else None
        name = quoted_name(here.processor) or HERE
        return _fleet(HERE, 1, here, goal, rates, watts or watts_of(name), price_of(name))
    count, name = parts_of(text)
    sheet = sheet_of(name)
    name = sheet["match"]
    if goal.utilization is None:
        calibration, rates = None, "bound"
    else:
        calibration, rates = assumed(sheet, goal.utilization), "assumed"
    there = Machine(
        cpu="unknown", num_cores=64, num_threads=64, ram_bytes=1 << 40, gpus=(catalogue().accelerator(sheet["name"]).gpu(),), os="Linux", python="", torch=None,
        device="cuda", num_ranks=count, planned=True, calibration=calibration,
    )  # fmt: skip
    return _fleet(name, count, there, goal, rates, watts_of(name), price_of(name))


def _fleet(
    name: str, count: int, machine: Machine, goal: Goal, rates: str, watts: float | None, price: float | None
) -> Fleet:
    """With the goal's own memory, price and grid before the catalogue's."""
    given = goal.price_per_hour
    own = given.get(name, price) if isinstance(given, dict) else price if given is None else given
    most = (1 - KEPT_FREE) * machine.memory_bytes
    if not machine.device.startswith("cuda"):
        most = machine.free_memory_bytes
    if goal.memory is not None:
        try:
            most = min(most, byte_count(goal.memory, machine.memory_bytes))
        except ValueError as error:
            raise SpecError(f"memory: {error}", fix="write memory: 70GB, or leave it out") from None
    return Fleet(name, count, machine, most, own, watts, goal.grid_g_per_kwh, rates)


def sheet_of(name: str) -> dict[str, Any]:
    """The data sheet of the GPU `name`, in any case. Raises SpecError with the known ones."""
    for row in data_sheets():
        if row["match"].casefold() == name.casefold():
            return row
    known = [row["match"] for row in data_sheets()]
    raise SpecError(
        f"no data sheet of '{name}'",
        fix=f"{did_you_mean(name, known)}known: {', '.join(known)}; this machine is {HERE}",
    )


def assumed(sheet: dict[str, Any], utilization: float) -> Calibration:
    """Rates of a GPU that is not here: `utilization` of its data sheet; attention at `ATTENTION` of that."""
    bytes_per_s = utilization * sheet["bytes_per_s"]
    flops = {name: utilization * rate for name, rate in sheet["flops_per_s"].items()}
    dtypes = [name for name in ("float32", "bfloat16", "float16") if name in flops]
    return Calibration(
        device=f"{sheet['name']}, {utilization:.0%} of its data sheet", threads=1, torch="",
        read_bytes_per_s=bytes_per_s, op_s=OP_S, exp_per_s=bytes_per_s / 8,
        copies=(Bandwidth(num_bytes=1 << 30, bytes_per_s=bytes_per_s),),
        matmuls=tuple(MatmulRate(dtype=name, m=8192, n=8192, k=8192, flops_per_s=flops[name]) for name in dtypes),
        attentions=tuple(
            AttentionRate(
                dtype=name, forward_flops_per_s=ATTENTION * flops[name], train_flops_per_s=ATTENTION * flops[name] / 3.5
            )
            for name in dtypes
        ),
        kernels=tuple(
            KernelRate(kernel=kernel, dtype=name, bytes_per_s=bytes_per_s)
            for kernel in ("rms_norm", "swiglu", "rope")
            for name in dtypes
        ),
    )  # fmt: skip


def precisions_of(fleet: Fleet) -> tuple[str, ...]:
    """The precisions of training that the device multiplies fast, by hone's names; on a CPU those whose rates were measured.

    A CPU may multiply bf16 four times as fast as float32 or ten times as slowly: without a rate nothing is said of it.
    """
    if not fleet.on_gpu:
        known = fleet.machine.calibration.dtypes if fleet.machine.calibration is not None else ()
        return ("fp32", "bf16") if "bfloat16" in known else ("fp32",)
    sheet = next((row for row in data_sheets() if row["match"] in fleet.machine.processor), None)
    eight = sheet is not None and "float8" in sheet["flops_per_s"]
    return ("bf16", "fp8", "fp8_blockwise") if eight else ("bf16",)


def _accelerator(name: str) -> Any:
    """The catalogue's row of a device; None where there is none."""
    try:
        return catalogue().accelerator(name)
    except SpecError:
        return None


def price_of(name: str) -> float | None:
    """Dollars an hour of one device on demand, quoted: the least of the providers' usual prices; None: unknown."""
    row = _accelerator(name)
    if row is None:
        return None
    return min((one.middle for one in catalogue().prices_of(row, "on_demand")), default=None)


def watts_of(name: str) -> float | None:
    """Watts of one device at most, quoted, so that joules by it are at most those; None: unknown."""
    row = _accelerator(name)
    return None if row is None else row.power_w


def catalogue_date() -> str | None:
    """The latest date of the catalogue's sources; None where none has one."""
    dates = [one.date for one in catalogue().sources.values() if one.date != "unknown"]
    return max(dates, default=None)


def quoted_name(processor: str) -> str | None:
    """The catalogue's name of a processor by its own; None where no data sheet is of it."""
    return next((row["match"] for row in data_sheets() if row["match"] in processor), None)
