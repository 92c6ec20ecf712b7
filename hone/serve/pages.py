"""The paged KV cache: one pool of fixed-size pages, shared by reference count and found again by content.

Kwon et al. 2023 (PagedAttention, arXiv:2309.06180). `PagePool` only counts; `KVCache` holds the tensors. A full page
has a key: a hash chained over everything before it. A freed page keeps its key until the page is needed for something
else, so the prefix cache costs no memory of its own; the page freed longest ago is taken first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import FitError
from hone.base.figure import human_bytes

NULL_PAGE = 0
"""Page that pads page tables: never given out, and zero (but where a captured pass's padding files its keys, unread)."""


def root_key(salt: str) -> bytes:
    """The key before the first page: prompts with different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page of `tokens` that follows the pages behind `parent`: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class _Content:
    """What a keyed page holds; compared on a hit, so that a hash collision can never hand out wrong pages."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PagePool:
    """Which page belongs to whom. A page is used (count above 0), cached (free, its content findable) or blank."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        if num_pages < 1:
            raise FitError(f"a KV cache of {num_pages} pages holds nothing", fix="give the cache more memory")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._counts = [0] * (num_pages + 1)
        self._contents: list[_Content | None] = [None] * (num_pages + 1)
        self._by_key: dict[bytes, int] = {}
        self._blank = list(range(num_pages, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # freed longest ago first

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with count 1 and unknown content, or None (nothing taken) when there are not enough."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            assert self._counts[page] == 0, f"page {page} was free and in use"
            self._counts[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The longest run of known pages that hold a proper prefix of `tokens`; each one's count goes up by 1.

        At least one token is always left over, because the model must be asked something to give logits.
        """
        pages: list[int] = []
        if not self.prefix_cache:
            return pages
        size = self.page_size
        parent = root_key(salt)
        for start in range(0, (len(tokens) - 1) // size * size, size):
            chunk = tuple(tokens[start : start + size])
            key = page_key(parent, chunk)
            page = self._by_key.get(key)
            if page is None or self._contents[page] != _Content(key, parent, chunk):
                break
            pages.append(page)
            parent = key
        for page in pages:
            if self._counts[page] == 0:
                del self._cached[page]
            self._counts[page] += 1
        return pages

    def key_of(self, page: int) -> bytes:
        """The key under which a matched page is found."""
        content = self._contents[page]
        assert content is not None, f"page {page} has no key"
        return content.key

    def publish(self, page: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Makes the full, computed `page` findable; returns its key, the parent of the next page's."""
        assert len(tokens) == self.page_size, f"a page of {len(tokens)} tokens is not full"
        assert self._counts[page] > 0, f"page {page} is published by nobody who holds it"
        key = page_key(parent, tokens)
        if self.prefix_cache and key not in self._by_key and self._contents[page] is None:
            self._by_key[key] = page
            self._contents[page] = _Content(key, parent, tuple(tokens))
        return key

    def free(self, pages: Sequence[int]) -> list[int]:
        """Takes one count off each page; returns those that nobody can reach any more.

        The last page of a sequence goes first, so that of a shared prefix the beginning stays longest.
        """
        gone = []
        for page in reversed(pages):
            assert page != NULL_PAGE and self._counts[page] > 0, f"page {page} is freed twice"
            self._counts[page] -= 1
            if self._counts[page] > 0:
                continue
            if self._contents[page] is not None:
                self._cached[page] = None
            else:
                self._blank.append(page)
                gone.append(page)
        return gone

    def forget(self, pages: Sequence[int]) -> None:
        """Makes the content of `pages` unfindable (it turned out wrong); whoever holds them keeps them."""
        for page in pages:
            if self._contents[page] is None:
                continue
            self._forget(page)
            if self._counts[page] == 0:
                del self._cached[page]
                self._blank.append(page)

    def clear(self) -> None:
        """Forgets every page's content."""
        self.forget(list(range(1, self.num_pages + 1)))

    def check(self) -> None:
        """Asserts that the books balance: used + cached + blank is everything, once each, and every key points back."""
        used = {page for page in range(1, self.num_pages + 1) if self._counts[page] > 0}
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a page is blank twice"
        assert not (used & blank or used & cached or blank & cached), "a page is in two states"
        assert len(used) + len(blank) + len(cached) == self.num_pages, "pages are lost"
        for key, page in self._by_key.items():
            content = self._contents[page]
            assert content is not None and content.key == key, f"page {page} lost its content"

    def _forget(self, page: int) -> None:
        content = self._contents[page]
        if content is not None:
            del self._by_key[content.key]
            self._contents[page] = None


class KVCache:
    """Keys and values of every layer, `[num_pages + 1, num_kv_heads, page_size, head_dim]` each, allocated once.

    Page 0 is the null page. `shapes` gives (num_kv_heads, head_dim) per layer.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        """Rotary cosines and sines of every position so far; `Paged` fills and reads it."""
        self._stores: list[Tensor] = []
        self.k: list[Tensor] = [torch.empty(0)] * len(shapes)
        self.v: list[Tensor] = [torch.empty(0)] * len(shapes)
        needed = (num_pages + 1) * page_bytes(shapes, page_size, dtype)
        try:
            for shape in dict.fromkeys(shapes):
                layers = [layer for layer, other in enumerate(shapes) if other == shape]
                heads, head_dim = shape
                # Not zeroed at once: pages are wiped when given out, and on a CPU what nobody touches takes no memory.
                store = torch.empty(
                    len(layers), 2, num_pages + 1, heads, page_size, head_dim, dtype=dtype, device=device
                )
                store[:, :, NULL_PAGE] = 0
                self._stores.append(store)
                for position, layer in enumerate(layers):
                    self.k[layer], self.v[layer] = store[position, 0], store[position, 1]
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise FitError(
                f"a KV cache of {num_pages} pages needs {human_bytes(needed)}, which cannot be had on {device}: "
                f"{str(error).splitlines()[0]}",
                fix="lower engine.cache_bytes or engine.num_pages, or use a smaller model or number format",
            ) from None

    @property
    def num_bytes(self) -> int:
        return sum(store.numel() * store.element_size() for store in self._stores)

    def wipe(self, pages: Sequence[int], value: float = 0.0) -> None:
        """Fills `pages` of every layer: zero before a page is given out, so that what nobody wrote is finite.

        Attention multiplies unwritten slots by a probability of zero, and zero times NaN would be NaN.
        """
        if pages:
            index = torch.tensor(pages, device=self._stores[0].device)
            for store in self._stores:
                store.index_fill_(2, index, value)


def page_bytes(shapes: Sequence[tuple[int, int]], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return sum(2 * heads * head_dim for heads, head_dim in shapes) * page_size * dtype.itemsize
