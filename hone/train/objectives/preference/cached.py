"""Log-probabilities of answers under the reference, computed when a sequence is first read and kept."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.feed.load import IGNORE, Batch
from hone.train.objectives.scoring import score
from hone.train.passes import Prepared, Trained

if TYPE_CHECKING:
    from hone.model.decoder import Decoder

_SIZE = 16


class ReferenceCache:
    """Prepares batches: `values` [B, S, 1] are, at each target, the log-probability of its whole answer under the reference.

    A sequence is known again by its content, so that from its second epoch on it costs no pass of the reference. The checkpoints of a training
    have the cache: computed again beside other sequences the last bits could differ.
    """

    parts = None

    def __init__(self) -> None:
        self.row: dict[str, float] = {}
        self.computed = 0
        """Sequences that the reference has computed."""
        self._known: dict[bytes, NDArray[np.float32]] = {}

    def prepare(self, trained: Trained, batch: Batch) -> Prepared:
        """Computes what is not known yet in one pass, with as many rows at once as a micro-batch has."""
        keys = [_key(*row) for row in zip(*batch[:3])]
        missing = [row for row, key in enumerate(keys) if key not in self._known]
        if missing:
            assert trained.teacher is not None, "cached without a reference"
            rows = max(len(keys) // trained.gradient_accumulation_steps, 1)
            some = Batch(*(array[missing] for array in batch[:3]))
            reference: Decoder = trained.teacher
            for row, found in zip(missing, score(reference, some, trained.device, rows)):
                valid = batch.targets[row] != IGNORE
                self._known[keys[row]] = np.bincount(_numbers(batch, row)[valid], found[valid]).astype(np.float32)
            self.computed += len(missing)
        values = np.zeros((*batch.targets.shape, 1), np.float32)
        for row, key in enumerate(keys):
            valid = batch.targets[row] != IGNORE
            values[row, valid, 0] = self._known[key][_numbers(batch, row)[valid]]
        return Prepared(*batch[:3], values)

    def state(self) -> dict[str, Tensor]:
        """The keys of the known sequences, how many answers each has, and these one after the other."""
        if not self._known:
            return {}
        keys, values = b"".join(self._known), [*self._known.values()]
        found = np.frombuffer(keys, np.uint8).reshape(-1, _SIZE).copy(), np.array([len(one) for one in values])
        named = zip(("keys", "sizes", "values"), (*found, np.concatenate(values)))
        return {name: torch.from_numpy(array) for name, array in named}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores `state`."""
        if not state:
            return
        keys, sizes, values = (state[name].numpy() for name in ("keys", "sizes", "values"))
        parts = np.split(values, np.cumsum(sizes)[:-1])
        self._known = {key.tobytes(): part for key, part in zip(keys, parts)}


def _key(*row: NDArray[np.generic]) -> bytes:
    digest = hashlib.blake2b(digest_size=_SIZE)
    for array in row:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _numbers(batch: Batch, row: int) -> NDArray[np.int64]:
    """The number of the document of each position, from 0."""
    return np.cumsum(np.diff(batch.document_ids[row], prepend=batch.document_ids[row, :1]) != 0)
