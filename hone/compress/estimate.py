"""What a compression will come to: exact bytes on disk, seconds, peak memory."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from hone.base.errors import ArtifactError, FitError
from hone.base.figure import Estimate, human_bytes
from hone.compress.calibration import Calibration
from hone.compress.shards import DTYPES, shard_bytes
from hone.compress.stream import Job
from hone.cost.facts import ModelFacts
from hone.cost.roofline import seconds
from hone.cost.steps import forward_seconds
from hone.measure.machine import Machine
from hone.model.folder import weights_bytes
from hone.model.hf import Checkpoint

DURABLE_S = 0.01
"""Seconds until a file and its folder entry are on disk, whatever its size; three a layer."""

Entry = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """A job and the data it will see, before any of it is done."""

    job: Job
    calibration: Calibration | None
    batch_size: int

    def model_bytes(self) -> int:
        """Bytes of all shards, exactly."""
        before = entries(self.job.checkpoint)
        total = shard_bytes((name, self.job.stored_rest(*before[name]), before[name][1]) for name in self.job.ends())
        for index in range(self.job.checkpoint.config.num_layers):
            after = {name: before[name] for name in self.job.inside(index)}
            if self.job.quantizer is not None:
                for module in self.job.checkpoint.layer_modules(index):
                    if module.attribute in self.job.targets[index]:
                        after.update(self._quantized(module.name, after.pop(f"{module.name}.weight")))
            total += shard_bytes((name, *entry) for name, entry in after.items())
        return total

    def _quantized(self, name: str, before: Entry) -> dict[str, Entry]:
        """The tensors that take the place of one module's weight."""
        quantizer = self.job.quantizer
        assert quantizer is not None
        shape, scale_dtype = before[1], quantizer.stored_scale_dtype(self.job.checkpoint.dtype)
        tensors = quantizer.scheme(shape[1]).tensors(*shape, scale_dtype)
        return {f"{name}.{suffix}": entry for suffix, entry in tensors.items()}

    def states_bytes(self) -> int:
        """Bytes of the hidden states of all calibration sequences."""
        if self.calibration is None:
            return 0
        return self.calibration.tokens.size * self.job.checkpoint.config.hidden_size * self.job.dtype.itemsize

    def need_disk(self, folder: Path) -> None:
        """Raises FitError when the model and two sets of hidden states do not fit beside `folder`."""
        there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        needed = self.model_bytes() + 2 * self.states_bytes() - there
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise FitError(
                f"{folder} needs {human_bytes(needed)} of disk, {human_bytes(free)} are free",
                fix="free disk space, write elsewhere, or use fewer num_sequences",
            )

    def estimates(self, machine: Machine, memory_before: int) -> dict[str, Estimate]:
        """model_bytes, bits_per_weight, time_s, peak_memory_bytes."""
        size = self.model_bytes()
        params = self.job.checkpoint.config.num_params
        exact = Estimate(value=size, unit="B", formula="headers, codes, scales and what stays as it is", tolerance=0.0)
        return {
            "model_bytes": exact,
            "bits_per_weight": Estimate(
                value=8 * size / params, unit="bits", formula="8 x bytes / parameters", tolerance=0.0
            ),
            "time_s": self._seconds(machine),
            "peak_memory_bytes": self._peak(memory_before),
        }

    def _seconds(self, machine: Machine) -> Estimate:
        """Two forward passes, the sums of x x^T, the solvers and the files."""
        checkpoint, job = self.job.checkpoint, self.job
        facts: ModelFacts = checkpoint.config.facts()
        dtype = str(job.dtype).removeprefix("torch.")
        forward = gather = 0.0
        bound = False
        if self.calibration is not None:
            rows, seq_len = self.calibration.tokens.shape
            batches, tokens = rows / self.batch_size, self.batch_size * seq_len
            once = forward_seconds(facts, machine, tokens=tokens, seq_len=seq_len, dtype=dtype, logit_tokens=1)
            forward, bound = 2 * batches * once.value, once.bound
        solve = 0.0
        for index in range(checkpoint.config.num_layers):
            linears = checkpoint.config.linears(index)
            for name in job.targets[index]:
                n_out, k_in = linears[name].out_features, linears[name].in_features
                if self.calibration is not None:
                    product = seconds(machine, matmul=(k_in, k_in, tokens), num_ops=1, dtype=dtype)
                    gather += batches * product.value
                for step in job.steps:
                    work = step.work(n_out, k_in)
                    one = seconds(machine, flops=work.flops, num_bytes=work.num_bytes, num_ops=work.num_ops)
                    solve, bound = solve + one.value, bound or one.bound
        moved = weights_bytes(checkpoint.folder) + 3 * self.model_bytes() + 2 * self.states_bytes() * facts.num_layers
        files = seconds(machine, num_bytes=moved).value + DURABLE_S * 3 * (facts.num_layers + 1)
        parts = {"two forward passes": forward, "sums of x x^T": gather, "solvers": solve, "files": files}
        formula = " + ".join(f"{name} {value:.3g} s" for name, value in parts.items() if value)
        return Estimate(value=sum(parts.values()), unit="s", formula=formula, bound=bound)

    def _peak(self, memory_before: int) -> Estimate:
        """States and the copy being written, a layer as computed and as stored, its Hessians, one batch or one solve."""
        checkpoint, width = self.job.checkpoint, self.job.dtype.itemsize
        config = checkpoint.config
        layer = hessians = solve = batch = 0
        for index in range(config.num_layers):
            linears = {name: (one.out_features, one.in_features) for name, one in config.linears(index).items()}
            weights = sum(n_out * k_in for n_out, k_in in linears.values())
            layer = max(layer, weights * (width + checkpoint.dtype.itemsize))
            shapes = [linears[name] for name in self.job.targets[index]]
            solve = max([solve, *(4 * (6 * n_out * k_in + 4 * k_in * k_in) for n_out, k_in in shapes)])
            if self.calibration is not None:
                hessians = max(hessians, sum(4 * k_in * k_in for _, k_in in shapes))
                tokens = self.batch_size * self.calibration.tokens.shape[1]
                batch = max(
                    batch, tokens * width * (2 * max(n_out for n_out, _ in linears.values()) + 4 * config.hidden_size)
                )
        parts = {
            "in use before": memory_before,
            "hidden states, twice": self.states_bytes()
            + (0 if self.job.device.startswith("cuda") else self.states_bytes()),
            "one layer": layer,
            "sums of x x^T": hessians,
            "one batch or one solve": max(solve, batch),
        }
        formula = " + ".join(f"{name} {human_bytes(value)}" for name, value in parts.items() if value)
        return Estimate(value=float(sum(parts.values())), unit="B", formula=formula)


def entries(checkpoint: Checkpoint) -> dict[str, Entry]:
    """Dtype and shape of every tensor of a checkpoint, from the headers of its files."""
    found: dict[str, Entry] = {}
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, row in header.items():
            if name == "__metadata__":
                continue
            if row["dtype"] not in DTYPES:
                raise ArtifactError(
                    f"{path}: {name} is stored as {row['dtype']}",
                    fix=f"hone compresses checkpoints stored as {', '.join(DTYPES)}",
                )
            found[name] = (DTYPES[row["dtype"]], tuple(row["shape"]))
    return {name: found[name] for name in checkpoint.names()}
