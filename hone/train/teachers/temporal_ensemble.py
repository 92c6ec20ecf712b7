"""A student that learns from the average of its own predictions of a text in earlier epochs.

Legend: S tokens of a sequence, k ids of a token, T tokens of a micro-batch, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.teachers.base import Teacher, Training, Tutor
from hone.train.teachers.cached import keep_for

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Step

torch = lazy("torch")
chunks = lazy("hone.cost.chunks")
kept_logits = lazy("hone.train.cached_logits.keep")
shards = lazy("hone.train.cached_logits.shards")
ops = lazy("hone.ops.loss.cached")

_KEYS, _COUNTS, _IDS, _SHARES = (f"teacher.{name}" for name in ("keys", "counts", "ids", "shares"))
"""Names in a checkpoint."""
BYTES = 8
"""Of an id and its probability, int32 and float32."""


class TemporalEnsemble(Teacher):
    """The exponential moving average of the student's predictions of a text over epochs, k ids a token; a text that was not read before has its tokens alone. Laine and Aila 2017, arXiv:1610.02242."""

    paper: ClassVar[str] = "arXiv:1610.02242"
    has_decoder: ClassVar[bool] = False
    decay: float = Field(0.6, gt=0, lt=1, description="Share of the average that stays when a text is read again.")
    k: int = Field(16, gt=0, description="Ids of each token that are kept; all others together are one more outcome.")

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        return Ensemble(self.decay, self.k)

    def remembered_bytes(self, sequences: float, seq_len: int) -> float:
        """Bytes of the averages of so many sequences, on the host and in each checkpoint."""
        return sequences * (seq_len * self.k * BYTES + 24)


@dataclass
class _Text:
    """A sequence that was read `count` times: the `ids` int32 [S, k] of the largest averages, and these as `shares` float32 [S, k].

    Averages begin at zero, so that they add up to 1 - decay^count at most.
    """

    count: int
    ids: Tensor
    shares: Tensor


class Ensemble(Tutor):
    """The averages of all sequences, found by a digest of their tokens. They learn what a step predicted when it has been made."""

    def __init__(self, decay: float, k: int) -> None:
        super().__init__(None)
        self._decay, self._k, self._temperature, self._vocab_size = decay, k, 1.0, 0
        self._texts: dict[bytes, _Text] = {}
        self._seen: list[tuple[bytes, Tensor, Tensor]] = []
        """Digest, ids and probabilities of the sequences of the step that is made."""

    def begin(self, trainer: Training) -> None:
        self._temperature, self._vocab_size = trainer.objective.temperature, len(trainer.model.head_weight)

    def look_up(self, batch: Batch, context: Context) -> None:
        """Gives `context` the averages of `batch`, without the zero at which they began."""
        keys, shape = shards.digests(batch), (batch.tokens.shape[1], self._k)
        texts = [self._texts.get(key) for key in keys]
        nothing = torch.zeros(shape)
        ids = torch.stack([nothing.int() if one is None else one.ids for one in texts]).flatten(0, 1)
        shares = [nothing if one is None else one.shares / (1 - self._decay**one.count) for one in texts]
        probabilities = torch.stack(shares).flatten(0, 1)
        least = torch.tensor(kept_logits.NOTHING)
        log_probs = torch.maximum(probabilities.log(), least)
        tails = torch.maximum((1 - probabilities.sum(-1)).clamp(min=0).log(), least)
        known = torch.tensor([one is not None for one in texts]).repeat_interleave(shape[0])
        device = context.positions.device
        ids, log_probs, tails, known = (one.to(device) for one in (ids.long(), log_probs, tails, known))
        kept = ops.Kept(ids, log_probs, self._vocab_size, self._temperature, tails, known=known)
        keep_for(context, kept, sees=partial(self._see, keys))

    def _see(self, keys: list[bytes], x: Tensor, weight: Tensor, softcap: float | None) -> None:
        """Keeps what normed hidden states x [T, D] predict by the head `weight` [V, D] until the step has been made."""
        size, parts = chunks.default_chunk_tokens(x.device.type, len(weight)), []
        for part in x.detach().split(size):
            logits = (part @ weight.detach().T).float()
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            ids, log_p, _ = kept_logits.most_likely(logits, self._k, self._temperature)
            parts.append((ids.int().cpu(), log_p.exp().cpu()))
        ids, shares = (torch.cat(one).unflatten(0, (len(keys), -1)) for one in zip(*parts, strict=True))
        self._seen += zip(keys, ids, shares, strict=True)

    def drop_grads(self) -> None:
        self._seen = []

    def stepped(self, trainer: Training, step: Step) -> None:
        for key, ids, shares in () if step.skipped else self._seen:
            text = self._texts.get(key)
            new = (1 - self._decay) * shares
            if text is None:
                self._texts[key] = _Text(1, ids, new)
                continue
            text.ids, text.shares = added(text.ids, self._decay * text.shares, ids, new)
            text.count += 1
        self._seen = []

    def state(self) -> dict[str, Tensor]:
        texts = list(self._texts.values())
        if not texts:
            return {}
        keys = torch.frombuffer(bytearray(b"".join(self._texts)), dtype=torch.uint8).view(len(texts), -1)
        counts = torch.tensor([one.count for one in texts])
        stacked = {_IDS: torch.stack([one.ids for one in texts]), _SHARES: torch.stack([one.shares for one in texts])}
        return {_KEYS: keys, _COUNTS: counts, **stacked}

    def restore(self, stored: SavedTensors) -> None:
        self._texts, self._seen = {}, []
        if _KEYS in stored.labels:
            keys, *each = (stored.whole(name) for name in (_KEYS, _COUNTS, _IDS, _SHARES))
            for key, count, ids, shares in zip(keys, *each, strict=True):
                self._texts[bytes(key.tolist())] = _Text(int(count), ids.clone(), shares.clone())


def added(ids: Tensor, shares: Tensor, more_ids: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """(ids int32 [S, k], shares [S, k]) of the k largest sums of two sparse vectors a token, whose own ids all differ."""
    same = ids[:, :, None] == more_ids[:, None, :]
    sums = shares + (same * more[:, None, :]).sum(-1)
    rest = more.masked_fill(same.any(1), -1.0)  # counted already: never among the largest, of which k are at least 0
    largest, at = torch.cat((sums, rest), -1).topk(ids.shape[1], -1)
    return torch.cat((ids, more_ids), -1).gather(-1, at), largest
