"""Seconds until files are on disk, and until an artifact's files are hashed."""

from __future__ import annotations

from dataclasses import dataclass

from hone.measure.machine import Machine

DURABLE_S = 0.01
"""Without a calibration, seconds until a file and its folder entry are on disk, whatever its size. (Virtual disk of a
two-core AMD EPYC: 8 ms.)"""

DISK_BYTES_PER_S = 1.1e9
"""Without a calibration, writing a large file and waiting until it is on disk (8.6 GB in 8 s beside an H200)."""

HASH_BYTES_PER_S = 1.5e9
"""SHA-256 on one core with instructions for it."""

TOKEN_BYTES = 64
"""Bytes of tokenizer.json a token: 25 with 2,048 tokens, 71 with Llama 3's 128,256."""

BESIDE_BYTES = 1 << 16
"""Config, index, rows and manifest of a model folder."""


def beside_bytes(vocab_size: int) -> float:
    """Bytes of a model folder beside its weights and logs."""
    return TOKEN_BYTES * vocab_size + BESIDE_BYTES


@dataclass(frozen=True)
class Disk:
    """How long a disk takes until files are on it."""

    durable_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, machine: Machine) -> Disk:
        """The calibrated disk, else a usual one."""
        found = machine.calibration
        if found is None or found.durable_s is None or found.disk_bytes_per_s is None:
            return cls(DURABLE_S, DISK_BYTES_PER_S)
        return cls(found.durable_s, found.disk_bytes_per_s)

    def seconds(self, num_bytes: float, *, files: int) -> float:
        """Until `files` files of `num_bytes` in all are on disk."""
        return num_bytes / self.bytes_per_s + files * self.durable_s


def commit_seconds(machine: Machine, num_bytes: float) -> float:
    """Until an artifact's weights are written, on disk and hashed for its manifest."""
    return Disk.of(machine).seconds(num_bytes, files=4) + num_bytes / HASH_BYTES_PER_S
