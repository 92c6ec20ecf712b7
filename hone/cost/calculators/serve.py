"""`hone cost serve`: sequences that fit a device beside the weights, and the time of a decode step that reads them."""

from __future__ import annotations

from pydantic import Field

from hone.base.errors import SpecError
from hone.cost.calculators.kv import KV, bytes_of
from hone.cost.calculators.model import Sized
from hone.cost.calculators.sheet import Sheet
from hone.cost.catalogue.read import catalogue

ROOFLINE = "Williams et al. 2009"


class ServeMemory(Sized):
    """Serving a model on devices of one kind."""

    accelerator: str = Field("H100", description="Device, by its name in the catalogue.")
    devices: int = Field(1, ge=1, description="Devices that divide every layer.")
    bits: float = Field(16, gt=0, description="Bits of a weight, its part of a scale included.")
    dtype: str = Field("bfloat16", description="Number format of products.")
    kv_dtype: str = Field("bfloat16", description="Number format of the cache.")
    context: int = Field(2048, ge=1, description="Tokens of a sequence in the cache.")
    batch: int = Field(0, ge=0, description="Sequences at once; 0: as many as fit.")
    reserve_gb: float = Field(3.5, ge=0, description="GB of a device for activations, graphs, NCCL and CUDA's context.")
    memory_use: float = Field(0.8, gt=0, le=1, description="Part of the memory's rate that a decode step reaches.")
    compute_use: float = Field(0.7, gt=0, le=1, description="Part of the rate of arithmetic that it reaches.")

    def sheet(self) -> Sheet:
        """Bytes of weights and of a sequence; sequences that fit; seconds of a step and tokens/s; the batch where arithmetic limits."""
        at = self.sized("layers", "hidden_size", "heads", "vocab_size")
        assert isinstance(at, ServeMemory)
        row, dims = catalogue().accelerator(self.accelerator), at.dims()
        rate = row.rate(self.dtype)
        if row.memory_bytes is None or row.bytes_per_s is None or rate is None:
            raise SpecError(
                f"memory or rates of {row.name} are unknown", fix="name another accelerator, or a row of your own"
            )
        found = Sheet(f"serving {dims.num_params / 1e9:,.1f} billion weights on {self.devices} x {row.name}")
        weights = found.add("bytes of weights", "N * bits / 8", "B", N=dims.num_params, bits=self.bits)
        kept = {one: getattr(at, one) for one in ("layers", "heads", "kv_heads", "head_dim", "latent_dim", "rope_dim")}
        cache = KV.read({**kept, "dtype": self.kv_dtype, "tokens": self.context}).sheet()
        token = found.add("bytes of a token in the cache", "values * b", "B", values=cache["bytes a token"] / bytes_of(self.kv_dtype), b=bytes_of(self.kv_dtype))  # fmt: skip
        room = found.add(
            "bytes left for the cache", "n * (M - reserve) - W", "B", n=self.devices, M=row.memory_bytes,
            reserve=self.reserve_gb * 1e9, W=weights,
        )  # fmt: skip
        if room <= 0:
            found.verdicts.append(f"the weights do not fit: use more than {self.devices} devices, or fewer bits")
            return found
        most = found.add(
            "sequences that fit", "floor(room / (token * context))", "", room=room, token=token, context=self.context
        )
        batch = self.batch or int(most)
        if not most or batch > most:
            found.verdicts.append(
                f"{batch or 1} sequences of {self.context:,} tokens do not fit: shorten them, or take more devices"
            )
            return found
        self._step(found, dims, batch, token, rate[0], row.bytes_per_s)
        return found

    def _step(self, found: Sheet, dims: object, batch: int, token: float, rate: float, bandwidth: float) -> None:
        """Adds the time of a decode step: weights read once, each cache once, every sequence multiplied with the weights of a token."""
        active, read = dims.matmul_params, dims.read_params(batch)  # type: ignore[attr-defined]
        used = {"n": self.devices, "beta": bandwidth, "u": self.memory_use}
        weights_s = found.add(
            "weights are read in", "R * bits / 8 / (n * beta * u)", "s", ROOFLINE, R=read, bits=self.bits, **used
        )
        caches_s = found.add("caches are read in", "B * context * token / (n * beta * u)", "s", ROOFLINE, B=batch, context=self.context, token=token, **used)  # fmt: skip
        products_s = found.add("products take", "2 * B * N / (n * pi * c)", "s", ROOFLINE, B=batch, N=active, n=self.devices, pi=rate, c=self.compute_use)  # fmt: skip
        step = found.add(
            "a decode step",
            "max(weights, products) + caches",
            "s",
            weights=weights_s,
            products=products_s,
            caches=caches_s,
        )
        found.add("tokens/s of all sequences", "B / step", "tokens/s", B=batch, step=step)
        found.add("tokens/s of one sequence", "1 / step", "tokens/s", step=step)
        found.add("batch from which arithmetic limits", "pi * c * bits / 8 / (2 * beta * u)", "sequences", ROOFLINE, pi=rate, c=self.compute_use, bits=self.bits, beta=bandwidth, u=self.memory_use)  # fmt: skip
        limit = "arithmetic" if products_s > weights_s else "reading weights"
        found.verdicts.append(
            f"{limit if max(weights_s, products_s) > caches_s else 'reading caches'} takes longest; links and launches are not counted"
        )
