"""Rotary positions as data: wavelengths, and their scaling for contexts longer than those of the training."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hone.base.errors import SpecError
from hone.base.spec import Spec


class Rope(Spec):
    """Rotary positions and their scaling for longer contexts."""

    theta: float = Field(10000.0, gt=0, description="Base of the wavelengths.")
    scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = Field(
        "none", description="Scaling of the positions for longer contexts."
    )
    factor: float = Field(1.0, ge=1, description="Factor by which the context was extended.")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: wavelengths longer than old context / this are scaled."
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: wavelengths shorter than old context / this are kept."
    )
    original_max_seq_len: int = Field(8192, gt=0, description="Context length before the extension.")
    attention_factor: float = Field(
        1.0, gt=0, description="yarn, longrope: rotated queries and keys are multiplied by it."
    )
    beta_fast: float = Field(
        32.0, gt=0, description="yarn: wavelengths with more turns than this in the old context are kept."
    )
    beta_slow: float = Field(
        1.0, gt=0, description="yarn: wavelengths with fewer turns than this in the old context are scaled."
    )
    truncate: bool = Field(
        True, description="yarn: whether the ramp between the two begins and ends at whole channels."
    )
    short_factor: tuple[float, ...] = Field(
        (), description="longrope: divisor of each frequency in sequences up to the old context."
    )
    long_factor: tuple[float, ...] = Field((), description="longrope: divisor of each frequency in longer sequences.")

    @model_validator(mode="after")
    def _factors_are_there(self) -> Rope:
        if self.scaling == "longrope" and (not self.short_factor or len(self.short_factor) != len(self.long_factor)):
            raise ValueError(
                f"longrope has {len(self.short_factor)} short_factor and {len(self.long_factor)} long_factor entries; "
                "it needs one of each for every rotated pair of channels"
            )
        return self

    @property
    def key(self) -> tuple[float | str, ...]:
        """The fields as plain values: torch.compile cannot look a spec up in a dictionary."""
        return (
            self.theta,
            self.scaling,
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.original_max_seq_len,
            self.attention_factor,
            self.beta_fast,
            self.beta_slow,
            self.truncate,
            *self.short_factor,
            *self.long_factor,
        )

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.scaling in ("dynamic", "longrope")

    def frequencies(self, dim: int, device: torch.device | str = "cpu", seq_len: int | None = None) -> Tensor:
        """Radians per position of each of the dim / 2 pairs, float32; `dim` channels of a head are rotated.

        RoPE: arXiv:2104.09864. linear: position interpolation, arXiv:2306.15595. llama3: the by-parts rule of the
        Llama 3.1 release (long wavelengths divided by `factor`, short ones kept, a ramp between). yarn:
        arXiv:2309.00071. dynamic: a base that grows with `seq_len` above the old context (NTK-aware interpolation).
        longrope: arXiv:2402.13753, divisors found by search, one set up to the old context and one above.
        Raises SpecError without a `seq_len` where they depend on it (`by_length`), or for divisors of another count.
        """
        steps = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
        if self.scaling == "dynamic":
            return 1.0 / self._grown_theta(dim, self._needed(seq_len)) ** steps
        plain = 1.0 / self.theta**steps
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "yarn":
            scaled = self._yarn_ramp(dim).to(device)
            return plain / self.factor * scaled + plain * (1 - scaled)
        if self.scaling == "longrope":
            divisors = self.long_factor if self._needed(seq_len) > self.original_max_seq_len else self.short_factor
            if len(divisors) != dim // 2:
                raise SpecError(
                    f"rope: longrope has {len(divisors)} divisors for {dim // 2} rotated pairs of channels",
                    fix="give short_factor and long_factor one entry for each pair",
                )
            return plain / torch.tensor(divisors, dtype=torch.float32, device=device)
        turns = self.original_max_seq_len * plain / (2 * torch.pi)  # rotations within the old context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * plain / self.factor + keep * plain

    def tables(
        self, positions: Tensor, dim: int, dtype: torch.dtype, seq_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., 1, dim / 2] of `positions` [...]; arguments as `frequencies`."""
        angles = positions[..., None].float() * self.frequencies(dim, positions.device, seq_len)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)

    def _needed(self, seq_len: int | None) -> int:
        if seq_len is None:
            raise SpecError(
                f"rope: the frequencies of scaling '{self.scaling}' depend on the sequence's length, which is not known",
                fix="give the context its rope_len: the longest sequence it will hold",
            )
        return seq_len

    def _grown_theta(self, dim: int, seq_len: int) -> float:
        stretch = max(seq_len, self.original_max_seq_len) / self.original_max_seq_len
        return self.theta * (self.factor * stretch - (self.factor - 1)) ** (dim / (dim - 2))

    def _yarn_ramp(self, dim: int) -> Tensor:
        """How much of each frequency is scaled, from 0 for the fastest to 1 for the slowest."""

        def place(turns: float) -> float:
            """The pair, counted with fractions, that turns this often within the old context."""
            return dim * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        line = torch.arange(dim // 2, dtype=torch.float32)
        return ((line - low) / ((high - low) or 0.001)).clamp(0, 1)
