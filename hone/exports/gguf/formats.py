"""The number formats of GGUF as data: sizes, groups that share a scale, and the places of a block's bits.

Source: ggml-org/ggml, docs/gguf.md and the block structs of src/ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = {"d": 2, "m": 2, "nibbles": 16, "sixes": 12, "signed_sixes": 12, "octets": 16}
"""Bytes of the parts of a block that hold scales: float16 `d` and `m`, and the ways to pack the integer scales of groups."""


@dataclass(frozen=True)
class Plane:
    """`bits` bits of each code from bit `first` on: byte i of each run of `width` bytes holds those of codes i, i + width,
    i + 2 width ... of the run, lowest bits first."""

    first: int
    bits: int
    width: int


@dataclass(frozen=True)
class Format:
    """How a row of a matrix is stored: blocks of `block` weights; every `group` of them share a scale.

    With `minimum` a weight is scale * code + minimum, codes from 0; without, scale * (code - `offset`). With `scale_bits`
    the scales (and minima) of groups are integers times the block's float16 `d` (and -`m`); else they are `d` and `m`.
    """

    name: str
    number: int
    """The type's number in the file (enum ggml_type)."""
    file_type: int
    """general.file_type of a file whose matrices are mostly of this type (enum llama_ftype)."""
    bits: int
    block: int = 1
    group: int = 1
    minimum: bool = False
    scale_bits: int = 0
    offset: int = 0
    parts: tuple[str | Plane, ...] = ()
    """The parts of a block in their order: keys of `SCALE_BYTES` and planes of codes; none for plain numbers."""
    fallback: str = "f16"
    """The format of matrices whose rows are not a whole number of blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        if not self.parts:
            return self.bits // 8
        sizes = (SCALE_BYTES[part] if isinstance(part, str) else self.block * part.bits // 8 for part in self.parts)
        return sum(sizes)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix."""
        assert columns % self.block == 0, f"rows of {columns} are no whole number of {self.name} blocks"
        return rows * (columns // self.block) * self.block_bytes

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code: from 0 with a minimum, else signed."""
        return (0, (1 << self.bits) - 1) if self.minimum else (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1)


_LOW = Plane(0, 4, 16)
_HIGH = Plane(4, 1, 1)
_K_LOW = Plane(0, 4, 32)
_PAIRS = Plane(0, 2, 32)

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("f32", 0, 0, 32),
        Format("f16", 1, 1, 16),
        Format("bf16", 30, 32, 16),
        Format("q8_0", 8, 7, 8, 32, 32, parts=("d", Plane(0, 8, 32))),
        Format("q5_1", 7, 9, 5, 32, 32, minimum=True, parts=("d", "m", _HIGH, _LOW)),
        Format("q5_0", 6, 8, 5, 32, 32, offset=16, parts=("d", _HIGH, _LOW)),
        Format("q4_1", 3, 3, 4, 32, 32, minimum=True, parts=("d", "m", _LOW)),
        Format("q4_0", 2, 2, 4, 32, 32, offset=8, parts=("d", _LOW)),
        Format(
            "q6_k", 14, 18, 6, 256, 16, scale_bits=8, offset=32,
            parts=(Plane(0, 4, 64), Plane(4, 2, 32), "octets", "d"), fallback="q8_0",
        ),
        Format(
            "q5_k", 13, 17, 5, 256, 32, minimum=True, scale_bits=6,
            parts=("d", "m", "sixes", Plane(4, 1, 32), _K_LOW), fallback="q5_1",
        ),
        Format(
            "q4_k", 12, 15, 4, 256, 32, minimum=True, scale_bits=6, parts=("d", "m", "sixes", _K_LOW), fallback="q5_0",
        ),
        Format(
            "q3_k", 11, 12, 3, 256, 16, scale_bits=6, offset=4,
            parts=(Plane(2, 1, 32), _PAIRS, "signed_sixes", "d"), fallback="q4_0",
        ),
        Format(
            "q2_k", 10, 10, 2, 256, 16, minimum=True, scale_bits=4, parts=("nibbles", _PAIRS, "d", "m"), fallback="q4_0",
        ),
    )
}  # fmt: skip
"""Every format that hone writes, widest first."""


def fitting(name: str, columns: int) -> Format:
    """The format called `name`, or the nearest that can store rows of `columns` weights."""
    found = FORMATS[name]
    while columns % found.block:
        found = FORMATS[found.fallback]
    return found
