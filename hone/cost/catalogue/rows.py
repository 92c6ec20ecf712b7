"""The rows of the hardware catalogue: accelerators, links, prices, grids, cooling and their sources, as frozen specs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.measure.machine import Gpu

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8", "float6", "float4", "int4")
"""Number formats that have a rate of their own."""

FORMATS = (*DTYPES, "nvfp4", "mxfp4", "mxfp6", "mxfp8", "int16")
"""Number formats that hardware may multiply without widening them."""


class Source(Spec):
    """Where figures are from."""

    title: str = Field(description="Author and title.")
    url: str = Field("", description="Address of the page; empty for one's own.")
    date: str = Field(description="When the source was published or read: YYYY, YYYY-MM or YYYY-MM-DD.")
    checked: bool = Field(
        True,
        description="Whether it was read for this catalogue; false: well-known figures, to check before they decide anything.",
    )

    @property
    def cited(self) -> str:
        """Its title, with a word where nobody read it for this catalogue."""
        return self.title if self.checked else f"{self.title} (unchecked)"


class Sourced(Spec):
    """A row whose every value has a source. Unknown values are None."""

    sources: dict[str, str] = Field(
        {"": "own"}, description="Key of the source of each field by its name; '' of all fields not named."
    )

    def source_of(self, field: str) -> str:
        """The key of the source of `field`."""
        return self.sources.get(field, self.sources.get("", "own"))

    @model_validator(mode="after")
    def _names_fields(self) -> Sourced:
        for field in self.sources:
            if field and field not in type(self).model_fields:
                raise ValueError(f"sources names the field '{field}', which a row does not have")
        return self


class Accelerator(Sourced):
    """One device on which models are trained or served. Rates are dense: vendors' figures with 2:4 sparsity are twice these."""

    name: str = Field(description="Vendor and product.")
    names: tuple[str, ...] = Field((), description="Short names by which it may be asked for.")
    match: str = Field("", description="Part of the name that the driver reports; alternatives separated by |.")
    vendor: str = Field("", description="Its maker.")
    architecture: str = Field("", description="Its maker's name of the generation.")
    capability: str = Field(
        "",
        pattern=r"^(\d+\.\d+)?$",
        description="CUDA's compute capability, as in 9.0; empty where there is none or it is unknown.",
    )
    kind: Literal["gpu", "tpu", "asic", "cpu", "soc"] = Field("gpu", description="What it is.")
    year: int | None = Field(None, description="Year in which it was first sold, or announced.")
    announced: bool = Field(False, description="Whether it was announced and is not known to be sold.")
    memory_bytes: float | None = Field(None, gt=0, description="Bytes of its memory, decimal as on the data sheet.")
    memory: str = Field("", description="Kind of its memory: HBM3e, GDDR7, SRAM ...")
    bytes_per_s: float | None = Field(None, gt=0, description="Bytes/s of its memory.")
    on_chip_bytes: float | None = Field(None, gt=0, description="Bytes of its largest memory on the chip.")
    on_chip: str = Field("", description="What that is: L2, L3, SRAM ...")
    flops_per_s: dict[str, float] = Field({}, description="Dense operations/s by number format, from the data sheet.")
    formats: tuple[str, ...] = Field((), description="Native number formats beside those that have a rate.")
    measured_flops_per_s: dict[str, float] = Field(
        {}, description="The most that products of matrices were measured to reach, by number format."
    )
    power_w: float | None = Field(None, gt=0, description="Watts of the device at most, as its maker says it.")
    link: str | None = Field(None, description="Name of the link to other devices of its fast domain.")
    num_linked: int | None = Field(None, ge=1, description="Devices of its fast domain, itself counted.")
    host_link: str | None = Field(None, description="Name of the link to the processor.")
    network: str | None = Field(None, description="Name of the usual port to other machines, one a device.")
    cooling: tuple[str, ...] = Field((), description="Names of the usual kinds of cooling.")
    embodied_kg: float | None = Field(None, gt=0, description="kg CO2e of making it.")
    note: str = Field("", description="What else a reader should know.")

    @model_validator(mode="after")
    def _has_known_formats(self) -> Accelerator:
        for table in ("flops_per_s", "measured_flops_per_s"):
            for dtype, rate in getattr(self, table).items():
                if dtype not in DTYPES:
                    raise ValueError(f"{table} has no number format '{dtype}'; they are {', '.join(DTYPES)}")
                if not rate > 0:
                    raise ValueError(f"{table}.{dtype} = {rate}: a rate is positive; leave out what is unknown")
        for dtype in self.formats:
            if dtype not in FORMATS:
                raise ValueError(f"formats has '{dtype}'; known are {', '.join(FORMATS)}")
        return self

    @property
    def native(self) -> tuple[str, ...]:
        """Number formats that it multiplies as they are: those with a rate, and others."""
        return tuple(dict.fromkeys([*self.flops_per_s, *self.formats]))

    def gpu(self) -> Gpu:
        """Itself as a machine describes a GPU, for plans of devices that are not here. Its memory must be known."""
        assert self.memory_bytes is not None, f"the memory of {self.name} is unknown"
        return Gpu(
            name=self.name, memory_bytes=int(self.memory_bytes), capability=self.capability, num_multiprocessors=0
        )

    @property
    def short(self) -> str:
        """The name to ask for it by."""
        return self.names[0] if self.names else self.name

    def ridge(self, dtype: str = "bfloat16") -> float | None:
        """FLOP for each byte at which arithmetic takes as long as reading memory; None where either is unknown."""
        rate = self.flops_per_s.get(dtype)
        return None if rate is None or self.bytes_per_s is None else rate / self.bytes_per_s

    def rate(self, dtype: str) -> tuple[float, str] | None:
        """(operations/s, the number format computed in) of products of `dtype`, which is widened where it is not native.

        None where no rate is known. Raises SpecError for a number format that is none.
        """
        if dtype not in WIDER:
            raise SpecError(f"no number format '{dtype}'", fix=f"use one of {', '.join(WIDER)}")
        for found in (dtype, *WIDER[dtype]):
            if found in self.flops_per_s:
                return self.flops_per_s[found], found
        return None


_SIXTEEN = ("bfloat16", "float16", "tf32", "float32")
WIDER: dict[str, tuple[str, ...]] = {
    "float64": (),
    "float32": (),
    "tf32": ("float32",),
    "bfloat16": ("float16", "tf32", "float32"),
    "float16": ("bfloat16", "tf32", "float32"),
    "float8": _SIXTEEN,
    "int8": _SIXTEEN,
    "float6": ("float8", *_SIXTEEN),
    "float4": ("float8", *_SIXTEEN),
    "int4": ("int8", *_SIXTEEN),
}
"""The formats into which numbers of one are widened, where hardware has no units for it: the first that it has.

bfloat16 on V100 is among them: the rate of float16 is a limit that its float32 does not reach.
"""


class Link(Sourced):
    """A link between devices, to the host, or between machines. Rates are of one direction, of one device or port."""

    name: str = Field(description="Name that accelerators refer to.")
    title: str = Field("", description="What it is, in words.")
    reach: Literal["domain", "host", "network"] = Field(
        description="Between devices, to the host, or between machines."
    )
    bytes_per_s: float | None = Field(None, gt=0, description="Bytes/s each way of a device to all its peers.")
    pair_bytes_per_s: float | None = Field(
        None, gt=0, description="Bytes/s each way between two devices; None: as many as to all."
    )
    measured_bytes_per_s: float | None = Field(
        None, gt=0, description="Bytes/s that a collective was measured to reach."
    )
    measured: str = Field("", description="Which collective, on what.")
    latency_s: float | None = Field(None, gt=0, description="Seconds of a message beside its bytes.")
    note: str = Field("", description="What else a reader should know.")


class Price(Sourced):
    """What an accelerator costs for an hour: quoted on a date, never a prediction."""

    accelerator: str = Field(description="Name of the accelerator.")
    kind: Literal["on_demand", "spot"] = Field(
        "on_demand", description="Kept until given back, or taken back at any time."
    )
    provider: str = Field("", description="Who asks it; empty: the lowest to the usual of several.")
    usd_per_h: float = Field(gt=0, description="US dollars an accelerator and hour, the lowest.")
    usd_per_h_high: float | None = Field(None, gt=0, description="The usual, where a range is quoted.")

    @property
    def middle(self) -> float:
        """The mean of the range."""
        return (self.usd_per_h + (self.usd_per_h_high or self.usd_per_h)) / 2


class Grid(Sourced):
    """How much carbon a kWh has: the mean of a country in a year, or the life cycle of a kind of plant."""

    name: str = Field(description="Two letters of the country (ISO 3166), or the kind of plant.")
    title: str = Field("", description="Its name in words.")
    kind: Literal["country", "plant"] = Field("country", description="A country's mean, or a plant's life cycle.")
    year: int = Field(description="Year of the mean.")
    g_per_kwh: float = Field(ge=0, description="g CO2e a kWh.")


class Cooling(Sourced):
    """A kind of cooling, with the power usage effectiveness (total / IT energy) that halls with it have."""

    name: str = Field(description="Name that accelerators refer to.")
    title: str = Field("", description="What it is, in words.")
    pue_low: float = Field(ge=1, description="Lowest usual power usage effectiveness.")
    pue_high: float = Field(ge=1, description="Highest usual power usage effectiveness.")
    max_rack_w: float | None = Field(None, gt=0, description="Watts of a rack that it carries off at most.")


class Target(Spec):
    """A family of hardware and the number formats that it multiplies as they are."""

    name: str = Field(description="Name of the family.")
    title: str = Field("", description="Which hardware that is.")
    accelerators: tuple[str, ...] = Field((), description="Names of its accelerators in the catalogue.")
    formats: dict[str, str] = Field({}, description="Native number formats, each with what does it.")
    stored: dict[str, str] = Field(
        {}, description="Formats that only save memory there, each with what happens to them."
    )
