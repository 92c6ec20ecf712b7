"""An EAGLE-3 head at work: after each step it reads what the model computed, then guesses one token per pass.

Its keys are in a cache of its own under the model's page numbers: in the slot of a token stands what the head computed from the model's
hidden states there and the token after it. What it computes while it guesses comes behind; the next step overwrites it. Pages behind those
that a sequence has in the step are spare ones of the cache, some for every place of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.cost.cache import keys_and_values
from hone.serve.paging.cache import KVCache
from hone.serve.paging.paged import Paged
from hone.serve.speculation.drafter import DraftSetting, Passed
from hone.serve.speculation.passes import Verified
from hone.serve.step import NULL_PAGE, ForwardBatch


class Eagle3Guesser:
    """The head with its cache."""

    branches = False

    def __init__(self, setting: DraftSetting, num_tokens: int, most_seqs: int) -> None:
        """Guesses `num_tokens` ahead while at most `most_seqs` sequences of a step got a token."""
        self._model, self._head, self._device = setting.model, setting.heads, setting.device
        self._count, self._most_seqs = num_tokens, most_seqs
        config, size = self._head.config, setting.block_size
        self.taps: tuple[int, ...] = config.taps
        ids = self._head.draft_ids
        self._all_tokens = len(ids) == config.vocab_size and bool((ids.cpu() == torch.arange(len(ids))).all())
        self._spare = -(-num_tokens // size) + 1
        """Spare pages for each place of a step."""
        mixer = config.layer.mixer
        most = min(most_seqs, setting.max_num_seqs)
        self._first_spare = setting.num_pages + 1
        self.cache: KVCache = KVCache(
            [keys_and_values(mixer.num_kv_heads, mixer.head_dim)],
            setting.num_pages + most * self._spare,
            size,
            dtype=self._model.dtype,
            device=self._device,
            rope_len=setting.max_model_len,
        )
        self.cache.wipe(
            np.arange(self._first_spare, self.cache.num_pages + 1)
        )  # written before they are read, but not whole

    def guess_on(self, passed: Passed) -> list[list[int]]:
        """Reads the pass, and guesses for the sequences that got a token; none where these are too many."""
        g, starts, lengths = self._read(passed)
        batch = passed.batch
        if not passed.sampled or len(passed.sampled) > self._most_seqs:
            return []
        ends = np.cumsum(lengths)[passed.sampled]
        g = g[torch.from_numpy(ends - 1).to(g.device)]
        places = (starts + lengths)[passed.sampled]
        table = self._widened(batch, passed.sampled, int(places.max()) + self._count)
        ones, found = np.ones(len(places), dtype=np.int64), []
        for ahead in range(self._count):
            if ahead:
                g = self._pass(found[-1], places + ahead - 1, ones, table, g)
            found.append(self._head.draft_ids[self._head.logits(g).argmax(-1)])
        guesses: list[list[int]] = torch.stack(found, 1).tolist()
        return guesses

    def read_on(self, passed: Passed) -> None:
        """Reads the pass: keys of its tokens are in the cache afterwards."""
        self._read(passed)

    def guess_in_round(self, verified: Verified) -> Tensor:
        """int64 [k, S, choices]: a pass over the path's tokens, whose last ones the next round overwrites where fewer were kept, then one a
        guess, behind the first choices of the places before."""
        head = self._head
        taps = verified.context.taps or {}
        h = verified.on_path(head.fuse(taps))
        _, g = self._states(verified.on_path(verified.chosen), h, verified.again(self.cache))
        g = verified.path_last(g)
        found = [verified.draw(self._everywhere(head.logits(g)), 0)]
        for ahead, context in enumerate(verified.onward(self.cache, self._count - 1), 1):
            normed, g = self._states(found[-1][:, 0], g, context)
            found.append(verified.draw(self._everywhere(head.lm_head(normed)), ahead))
        return torch.stack(found)

    def _states(self, tokens: Tensor, h: Tensor, context: Paged) -> tuple[Tensor, Tensor]:
        """(norm of g, g), [T, D] each, of a pass of the head, whose `tokens` are those after the ones whose slots it fills."""
        embedded = self._head.embed(tokens, self._model)
        self._head.prepare(embedded, context)
        found: tuple[Tensor, Tensor] = self._head.states(embedded, h, context)
        return found

    def _everywhere(self, logits: Tensor) -> Tensor:
        """[S, V] of the head's logits [S, W]: -inf where it guesses no token, so that noise is that of the model's tokens."""
        if self._all_tokens:
            return logits
        whole = logits.new_full((len(logits), self._head.config.vocab_size), float("-inf"))
        return whole.index_copy_(1, self._head.draft_ids, logits)

    def _read(self, passed: Passed) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """(g [T, D] of the tokens that stay, where each sequence's begin, how many it has)."""
        chosen, lengths = self._known(passed)
        batch = passed.batch
        starts = batch.ends - batch.lengths
        tokens = self._next_tokens(passed, lengths)
        on = torch.from_numpy(chosen).to(passed.x.device)
        taps = {layer: None if one is None else one[on] for layer, one in passed.taps.items()}
        return self._pass(tokens, starts, lengths, batch.table, self._head.fuse(taps)), starts, lengths

    def _known(self, passed: Passed) -> tuple[np.ndarray, np.ndarray]:
        """The places of the pass's tokens that stay, and how many each sequence has: without guesses that were refused."""
        batch = passed.batch
        lengths = (batch.lengths - passed.step.num_guesses).astype(np.int64)
        lengths[passed.sampled] += np.asarray(passed.kept, dtype=np.int64)
        begins = batch.last_indices() + 1 - batch.lengths
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(begins, lengths) + np.arange(lengths.sum()) - first, lengths

    def _next_tokens(self, passed: Passed, lengths: np.ndarray) -> np.ndarray:
        """int64 [sum(lengths)] The token after each one that stays; 0 where nobody knows it yet, which spoils a guess at most."""
        chosen, _ = self._known(passed)
        last = np.cumsum(lengths) - 1
        tokens = passed.batch.tokens[np.minimum(chosen + 1, len(passed.batch.tokens) - 1)]
        tokens[last] = np.maximum(passed.step.next_tokens, 0)
        tokens[last[passed.sampled]] = passed.last
        return tokens

    def _widened(self, batch: ForwardBatch, sampled: Sequence[int], most: int) -> np.ndarray:
        """int32 [len(sampled), pages of `most` tokens]: their pages, with spare ones behind those that they have in the step."""
        size = self.cache.block_size
        width = max(-(-most // size), batch.table.shape[1])
        table = np.full((len(sampled), width), NULL_PAGE, dtype=np.int32)
        table[:, : batch.table.shape[1]] = batch.table[sampled]
        for row, index in enumerate(sampled):
            used = -(-int(batch.ends[index]) // size)
            spare = self._first_spare + row * self._spare
            count = min(width - used, self._spare)
            table[row, used : used + count] = np.arange(spare, spare + count)
        return table

    def _pass(
        self, tokens: np.ndarray | Tensor, starts: np.ndarray, lengths: np.ndarray, table: np.ndarray, h: Tensor
    ) -> Tensor:
        """g [T, D] of a pass of the head, whose `tokens` are those after the ones whose slots it fills."""
        known = isinstance(tokens, np.ndarray)
        ids = tokens if known else np.zeros(len(tokens), dtype=np.int64)
        batch = ForwardBatch.of(ids, starts, lengths, table, self.cache.block_size)
        context = Paged(self.cache, batch, self._device)
        return self._states(context.tokens if known else tokens, h, context)[1]
