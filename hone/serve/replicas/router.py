"""Which replica takes a request: the one that holds most of its prompt's pages, unless it has too much to do.

Prefix-aware routing with a limit of imbalance, as in Preble (Srivatsa et al. 2024, arXiv:2407.00023) and SGLang's router
(Zheng et al. 2024, arXiv:2312.07104); the pages are known by their chained hashes, those of the prefix cache. Where no replica
is ahead, all fronts choose the same one by rendezvous hashing (Thaler and Ravishankar 1998) without asking each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from hone.serve.paging.pages import chain_keys


class Router:
    """Remembers the last `max_keys` pages by the replica that was given them last; `load` is a replica's sequences in progress.

    A replica has too much to do when its load is above that of the least loaded by more than `abs_threshold` and by more
    than the factor `rel_threshold`. There are places for `replicas`, and all take prompts until some are retired.
    """

    def __init__(
        self,
        replicas: int,
        load: Callable[[int], int],
        *,
        block_size: int,
        max_keys: int,
        abs_threshold: int,
        rel_threshold: float,
    ) -> None:
        self._replicas = replicas
        self._active = list(range(replicas))
        self._load = load
        self._block_size = block_size
        self._max_keys = max_keys
        self._abs, self._rel = abs_threshold, rel_threshold
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # bits: the replicas that hold a page

    @property
    def places(self) -> int:
        """How many replicas there may be."""
        return self._replicas

    def place(self, prompt: Sequence[int], salt: str = "") -> tuple[int, list[bytes]]:
        """The replica for `prompt`, and the keys of the pages that it will hold."""
        keys = chain_keys(prompt, self._block_size, salt)
        loads = {replica: self._load(replica) for replica in self._active}
        assert loads, "some replica takes requests"
        least = min(loads.values())
        held = self._held(keys)
        most = max(held[replica] for replica in loads)
        best = [replica for replica in loads if held[replica] == most]
        if most:
            best = [replica for replica in best if not self._is_too_busy(loads[replica], least)]
        if not most or not best:
            best = [replica for replica in loads if loads[replica] == least]
        else:
            lowest = min(loads[replica] for replica in best)
            best = [replica for replica in best if loads[replica] == lowest]
        chosen = max(best, key=lambda replica: _weight(keys, replica))
        self.learn(keys, chosen)
        return chosen, keys

    def learn(self, keys: Sequence[bytes], replica: int) -> None:
        """From now on `replica` holds the pages with these keys."""
        for key in keys:
            self._holders[key] = self._holders.pop(key, 0) | 1 << replica
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def retire(self, replica: int) -> None:
        """`replica` gets no prompt any more, and what it held counts as gone."""
        self._active = [one for one in self._active if one != replica]
        for key in [key for key, holders in self._holders.items() if holders >> replica & 1]:
            self._holders[key] &= ~(1 << replica)
            if not self._holders[key]:
                del self._holders[key]

    def admit(self, replica: int) -> None:
        """`replica`, one of those there may be, takes prompts from now on."""
        assert 0 <= replica < self._replicas, f"there are places for {self._replicas} replicas"
        self._active = sorted({*self._active, replica})

    def _held(self, keys: list[bytes]) -> list[int]:
        """Of each replica, how many of the first pages it holds without a gap."""
        held = [0] * self._replicas
        without_gap = (1 << self._replicas) - 1
        for count, key in enumerate(keys, 1):
            without_gap &= self._holders.get(key, 0)
            if not without_gap:
                break
            for replica in range(self._replicas):
                if without_gap >> replica & 1:
                    held[replica] = count
        return held

    def _is_too_busy(self, load: int, least: int) -> bool:
        return load - least > self._abs and load > self._rel * least


def _weight(keys: list[bytes], replica: int) -> bytes:
    """A prompt's order of the replicas, by its first page."""
    return blake2b((keys[0] if keys else b"") + replica.to_bytes(2, "big"), digest_size=8).digest()
