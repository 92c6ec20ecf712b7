"""A checkpoint read as a rotated one: every tensor is multiplied by the rotations around it when it is read.

Shapes: N rows, K columns of a weight. R [D, D] is orthogonal, and a row of hidden states x becomes x R: columns of
weights that read x are multiplied by R, rows of weights that write it by R^T.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from hone.base.figure import human_bytes
from hone.base.run import Run
from hone.compress.transforms.turning import Turning, values_of
from hone.model.config import ModelConfig
from hone.model.families.config_json import OWN
from hone.model.hf import config_values
from hone.model.linear_spec import Norm
from hone.model.quantized import hadamard
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View, WeightSource
from hone.model.weights.tensors import layer_tensors

CHUNK = 1 << 22
"""Values that are float64 at a time where rows change alone."""
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"

Turn = Callable[[Tensor], Tensor]
"""x [..., n * D] to x diag(R, ..., R), float64."""


@dataclass(frozen=True)
class NormWeight:
    """A norm's weight by its tensor's name: the norm multiplies by weight + offset."""

    name: str
    offset: float


@dataclass(frozen=True)
class Change:
    """How a tensor of the rotated model is made from the one called `source`."""

    source: str
    folded: NormWeight | None = None
    """The norm whose weight multiplies the columns."""
    columns: tuple[Turn, ...] = ()
    """Rotations of the columns, in order."""
    rows: Turn | None = None
    """The rotation of the rows from `begin` to `end`, of a bias as well."""
    begin: int = 0
    end: int | None = None
    filled: float | None = None
    """The value of all entries instead: of a norm that was folded."""


class RotatedWeights(View):
    """The weights of `source` as `changes` say, by the tensor's name.

    Products are computed in float64 on `device`, and rounded once to the dtype of the tensor: `dtype` where the tensor of the
    source has another name.
    """

    def __init__(self, source: WeightSource, changes: dict[str, Change], dtype: torch.dtype, device: str) -> None:
        super().__init__(source)
        self.changes, self.dtype, self.device = changes, dtype, device
        self._kept: dict[str, Tensor] | None = None

    def reopened(self) -> Self:
        """As the base; it keeps the tensors of layers, which the engine reads twice, until it is freed."""
        opened = super().reopened()
        opened._kept = {}
        return opened

    def names(self) -> list[str]:
        added = [HEAD] if HEAD in self.changes else []
        return list(dict.fromkeys((*self.source.names(), *added)))

    def tensor(self, name: str) -> Tensor:
        change = self.changes.get(name)
        if change is None:
            return self.source.tensor(name)
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        stored = self.source.tensor(change.source)
        made = self._changed(stored, change).to("cpu", self.dtype if change.source != name else stored.dtype)
        if self._kept is not None and name.startswith("model.layers."):
            self._kept[name] = made
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        change = self.changes.get(name)
        return self.source.shape(name if change is None else change.source)

    def file(self, name: str) -> Path:
        change = self.changes.get(name)
        return self.source.file(name if change is None else change.source)

    def _changed(self, stored: Tensor, change: Change) -> Tensor:
        """The rotated values of a tensor, float64 where its rows change, else in its dtype."""
        if change.filled is not None:
            return torch.full_like(stored, change.filled)
        whole = change.rows is not None
        made = self._wide(stored) if whole else torch.empty_like(stored)
        scales = None
        if change.folded is not None:
            scales = self._wide(self.source.tensor(change.folded.name)) + change.folded.offset
        step = max(1, CHUNK // stored.shape[-1])
        for start in range(0, len(stored) if scales is not None or change.columns else 0, step):
            piece = self._wide(stored[start : start + step])
            piece = piece if scales is None else piece * scales
            for turn in change.columns:
                piece = turn(piece)
            made[start : start + step] = piece
        if change.rows is not None:
            part = made[change.begin : change.end]
            part.copy_(change.rows(part) if part.dim() == 1 else change.rows(part.T).T)
        return made

    def _wide(self, stored: Tensor) -> Tensor:
        return stored.to(self.device, torch.float64)


def rotated_model(
    source: ModelSource, rotation: Turning, hadamards: dict[str, int], device: str = "cpu"
) -> ModelSource:
    """The model of `source` with rotated weights; its linears in `hadamards` multiply their inputs (R4)."""
    config = rotation.reshape(source.config)
    own = source.values.get("model_type") == OWN
    tied = {"tie_word_embeddings": config.tie_embeddings}
    values = config_values(config, source.dtype) if own else source.values | tied
    weights = RotatedWeights(source, dict(_changes(source.config, rotation, hadamards)), source.dtype, device)
    return ModelSource(source.folder, config, values, weights, hadamards=hadamards)


def rotated(source: ModelSource, rotation: Turning, hadamards: dict[str, int], run: Run) -> ModelSource:
    """`source` as `rotation` leaves it. Raises ArtifactError for tensors that its config does not describe."""
    source.empty()
    made = rotated_model(source, rotation, hadamards, run.device)
    if source.config.tie_embeddings and not made.config.tie_embeddings:
        size = human_bytes(source.config.vocab_size * source.config.hidden_size * source.dtype.itemsize)
        run.say(f"rotation: the head, which was tied to the embedding, is stored apart: {size} more")
    return made


def random_rotation(size: int, seed: int, name: str) -> Turn:
    """A random rotation of `size` columns: random signs, then a Hadamard matrix; of a QR decomposition where there is none.

    Depends on the seed, the name and the size alone.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(number)
    if hadamard.factors(size):
        signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        return lambda x: hadamard.multiply((x.unflatten(-1, (-1, size)) * signs.to(x.device)).flatten(-2), size)
    orthogonal, triangle = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix = orthogonal * triangle.diagonal().sign()  # so that all rotations are equally likely
    return lambda x: (x.unflatten(-1, (-1, size)) @ matrix.to(x.device)).flatten(-2)


def _changes(config: ModelConfig, rotation: Turning, hadamards: dict[str, int]) -> Iterator[tuple[str, Change]]:
    """Every tensor of the rotated model that differs, and how it is made."""
    stream = random_rotation(config.hidden_size, rotation.seed, "residual") if rotation.r1 else None
    if stream is not None:
        yield EMBEDDING, Change(EMBEDDING, columns=(stream,))
        head = EMBEDDING if config.tie_embeddings else HEAD
        yield HEAD, Change(head, folded=NormWeight(NORM, config.norm_offset), columns=(stream,))
        yield NORM, Change(NORM, filled=1.0 - config.norm_offset)
    for index in range(config.num_layers):
        values = values_of(config, index) if rotation.r2 else None
        turn = None if values is None else random_rotation(values.head_dim, rotation.seed, f"layers.{index}.values")
        norms = config.singles(index)
        for tensor in layer_tensors(config, index):
            module, path = tensor.module, tensor.path
            if module is None:
                continue
            linear, weight = module.linear, len(tensor.shape) > 1
            folded, columns = None, []
            if stream is not None and isinstance(linear.reads, Norm) and linear.reads.of_stream:
                folded = NormWeight(norms[f"{linear.reads.name}.weight"], config.norm_offset)
                columns.append(stream)
            if values is not None and path == values.out:
                columns.append(turn)
            if f"layers.{index}.{module.matrix}" in hadamards:
                columns.append(partial(hadamard.multiply, size=hadamards[f"layers.{index}.{module.matrix}"]))
            begin, end = module.rows.start, module.rows.stop
            rows = (stream, 0, module.num_rows) if linear.residual else (None, 0, None)
            if values is not None and path == values.path and begin < values.end and end > values.begin:
                rows = (turn, values.begin - begin, values.end - begin)
                assert rows[1] >= 0 and rows[2] <= module.num_rows, f"the values of {path} lie in several modules"
            if weight and (columns or rows[0] is not None):
                yield tensor.name, Change(tensor.name, folded, tuple(columns), *rows)
            elif rows[0] is not None:
                yield tensor.name, Change(tensor.name, None, (), *rows)
        reads = {
            one.reads for one in config.linears(index).values() if isinstance(one.reads, Norm) and one.reads.of_stream
        }
        for name in sorted(norms[f"{one.name}.weight"] for one in reads) if stream is not None else ():
            yield name, Change(name, filled=1.0 - config.norm_offset)
