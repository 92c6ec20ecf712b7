"""The pages of every sequence: allocated, found again by prefix, entered in the prefix cache, freed.

The scheduler moves sequences and asks here for their pages, as with nano-vllm's BlockManager and vLLM's KVCacheManager.
"""

from __future__ import annotations

import sys

from hone.serve.kv_policies.policy import KeptTokens
from hone.serve.paging.pages import PagePool, chain_keys, root_key
from hone.serve.sequence import Seq


class PageManager:
    """Gives sequences pages of one `PagePool`. `kept` says what stays of each one's pages.

    A step computes at most `max_num_batched_tokens` tokens: a sequence that a KV policy bounds never needs more at once.
    """

    def __init__(self, pool: PagePool, *, max_num_batched_tokens: int, kept: KeptTokens | None = None) -> None:
        self.pool = pool
        self.kept = kept or KeptTokens()
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._size = pool.block_size
        self._new: list[int] = []  # pages that were allocated since `take_new_pages`
        self._coming: dict[bytes, Seq] = {}
        """Keys of pages that a running sequence will fill: others with the same prefix wait for them."""

    def take_new_pages(self) -> list[int]:
        """The pages that were allocated since the last call: to be wiped before a step writes to them."""
        new, self._new = self._new, []
        return new

    def allocate(self, seq: Seq, reserve: int = 0) -> bool:
        """Allocates pages for all tokens of a waiting sequence, cached ones first; False unless `reserve` pages stay free.

        A KV policy may need fewer: then those of cached tokens to which no token attends any more are freed again.
        """
        pool, size = self.pool, self._size
        if pool.enable_prefix_caching:
            seq.keys = seq.keys or chain_keys(self._shareable(seq), size, seq.salt)
        found = [] if _scoring(seq) else pool.match(self._shareable(seq), seq.salt, seq.keys)
        dropped = self.kept.num_dropped(len(found) * size, size)
        sinks = self.kept.sink_pages(size)
        pool.free(found[sinks : sinks + dropped // size])
        cached = found[:sinks] + found[sinks + dropped // size :]
        missing = self._most_pages(len(seq.tokens) - dropped) - len(cached)
        if missing + reserve > pool.num_free:
            pool.free(cached)
            return False
        seq.pages = cached
        extended = self._extend(seq, missing)
        assert extended, "the pool had enough pages"
        pool.count_hits(found)
        seq.num_computed = seq.drafted = len(found) * size
        seq.num_dropped = dropped
        if self.kept.compaction is not None:
            seq.boundary = self.kept.compaction.boundary(seq.num_prompt, seq.num_computed)
        seq.published = len(found)
        self._set_page_end(seq)
        seq.key = pool.key_of(found[-1]) if found else root_key(seq.salt)
        if pool.enable_prefix_caching:
            for key in seq.keys[seq.published :]:
                self._coming.setdefault(key, seq)
        if seq.num_preemptions == 0:
            seq.num_cached = seq.num_computed
            self.prefix_queries += seq.num_prompt
            self.prefix_hits += seq.num_computed
        return True

    def append(self, seq: Seq, length: int) -> bool:
        """Allocates what is missing for `length` tokens of a running sequence; False, without a change, when too few are free."""
        missing = -(-(length - seq.num_dropped) // self._size) - len(seq.pages)
        return missing <= 0 or self._extend(seq, missing)

    def top_up(self, seq: Seq) -> None:
        """Gives a sequence that a KV policy bounds the pages that it needs at once, as far as there are any."""
        if self.kept.window is not None:
            missing = self._most_pages(seq.length - seq.num_dropped) - len(seq.pages)
            self._extend(seq, min(max(0, missing), self.pool.num_free))

    def _extend(self, seq: Seq, count: int) -> bool:
        pages = self.pool.allocate(count)
        if pages is None:
            return False
        seq.pages += pages
        self._new += pages
        return True

    def deallocate(self, seq: Seq) -> None:
        """Frees all pages of a sequence: none of its tokens is computed any more, except where they are still cached."""
        for key in seq.keys[seq.published :]:
            if self._coming.get(key) is seq:
                del self._coming[key]
        self.pool.retain(seq.pages, seq.request.retention)
        self.pool.free(seq.pages)
        seq.pages, seq.keys = [], []
        seq.num_computed = seq.num_dropped = seq.drafted = 0
        seq.compacted = False

    def is_coming(self, seq: Seq) -> bool:
        """Whether a running sequence will fill the first page of a waiting sequence's prefix that is not in the cache."""
        if not self._coming or _scoring(seq):
            return False
        tokens = self._shareable(seq)
        if not seq.keys:
            seq.keys = chain_keys(tokens, self._size, seq.salt)
        first = self.pool.num_known(seq.keys)
        return first < (len(tokens) - 1) // self._size and seq.keys[first] in self._coming

    def num_computable(self, seq: Seq) -> int:
        """Tokens of a sequence that one step may compute: to its end, its pages' or its next compaction, if any."""
        room = len(seq.pages) * self._size + seq.num_dropped
        return max(0, min(seq.length, seq.boundary, room) - seq.num_computed)

    def advance(self, seq: Seq, computed: int, drafted: int | None = None) -> None:
        """`computed` tokens of the sequence are in its pages; full pages of known tokens enter the prefix cache.

        With a draft model only pages that also hold the draft model's keys (`drafted` tokens) are entered.
        """
        seq.num_computed = computed
        if self.pool.enable_prefix_caching and not seq.compacted:
            known = min(computed, len(seq.tokens))
            self._publish(seq, known if drafted is None else min(known, drafted))
        if self.kept.window is not None:
            self._drop(seq)

    def _publish(self, seq: Seq, known: int) -> None:
        """Enters the full pages of a sequence's first `known` tokens in the prefix cache."""
        size = self._size
        while (seq.published + 1) * size <= known:
            start, index = seq.published * size, seq.published
            if index >= self.kept.sink_pages(size):
                index -= seq.num_dropped // size
            seq.key = self.pool.publish(seq.pages[index], seq.key, seq.tokens[start : start + size])
            seq.published += 1
            self._set_page_end(seq)
            if self._coming.get(seq.key) is seq:
                del self._coming[seq.key]

    def _set_page_end(self, seq: Seq) -> None:
        """Below this number of computed tokens no page of the sequence is full or dropped: `advance` has nothing to do."""
        if self.kept.window is not None:
            seq.page_end = 0
        elif self.pool.enable_prefix_caching:
            seq.page_end = (seq.published + 1) * self._size
        else:
            seq.page_end = sys.maxsize

    def _drop(self, seq: Seq) -> None:
        """Frees the pages to which no token attends any more; as many as the rest of its tokens needs are allocated again."""
        size, sinks = self._size, self.kept.sink_pages(self._size)
        dropped = self.kept.num_dropped(seq.num_computed, size)
        count = (dropped - seq.num_dropped) // size
        if count <= 0:
            return
        self.pool.free(seq.pages[sinks : sinks + count])
        stay = seq.pages[:sinks] + seq.pages[sinks + count :]
        seq.num_dropped = dropped
        wanted = self._most_pages(seq.length - dropped)
        self.pool.free(stay[wanted:])
        seq.pages = stay[:wanted]  # a new list: what was copied from the old one is out of date
        # Pages that others share are not free now: then there are fewer, and `top_up` brings the rest.
        self._extend(seq, max(0, min(count, wanted - len(stay), self.pool.num_free)))

    def compaction_targets(self, seq: Seq, count: int) -> list[int] | None:
        """`count` pages to which tokens of a sequence may be moved, its own ones first; None when there are too few.

        Pages that others use or may find in the prefix cache keep what they hold.
        """
        targets = [page for page in seq.pages if self.pool.is_private(page)][:count]
        more = self.pool.allocate(count - len(targets))  # not wiped before the next step: they are full by then
        if more is None:
            own = [page for page in seq.pages if page not in targets]
            more = self.pool.claim(own, count - len(targets))
            if len(targets) + len(more) < count:
                return None
        return targets + more

    def moved(self, seq: Seq, pages: list[int], num_dropped: int) -> None:
        """A sequence's tokens, but for `num_dropped`, were moved to `pages`, its `compaction_targets`."""
        self.pool.free([page for page in seq.pages if page not in pages])
        seq.pages = pages  # a new list: what was copied from the old one is out of date
        seq.num_dropped = num_dropped
        seq.compacted = True

    def _most_pages(self, length: int) -> int:
        """Pages that a sequence with `length` tokens to keep or compute needs at once."""
        return self.kept.most_pages(length, self.max_num_batched_tokens, self._size)

    def _shareable(self, seq: Seq) -> list[int]:
        """Its tokens whose pages may be shared: those of the prompt where it is compacted at the prompt's end."""
        return seq.tokens if self.kept.compaction is None else seq.tokens[: seq.num_prompt]


def _scoring(seq: Seq) -> bool:
    """Whether every position of its prompt must be computed, cached or not."""
    return (seq.prompt_logprobs is not None or seq.request.pooling == "mean") and seq.num_output == 0
