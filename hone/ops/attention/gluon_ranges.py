"""Rules under which a query attends to one range of keys, or a key to one range of queries: one comparison per pair.

Each function agrees with the rule in `masks` that it replaces, for positions whose sums fit an int32.
"""

from __future__ import annotations

from typing import Any

from hone.ops.attention.masks import Tiles, gluon_function

_FAR = 1 << 30
"""From here on the sum of a position and a parameter may exceed an int32."""


def keys_of(tiles: Tiles) -> Any:
    """(q, q_data, params) -> (first, last) key that a query attends to, as a Gluon function; None for other rules."""
    return _known(KEYS, tiles)


def queries_of(tiles: Tiles) -> Any:
    """(k, params) -> (first, last) query that attends to a key, as a Gluon function; None for other rules."""
    return _known(QUERIES, tiles)


def _known(ranges: dict[str, str], tiles: Tiles) -> Any:
    known = tiles.rule in ranges and all(abs(number) < _FAR for number in tiles.params)
    return gluon_function(ranges[tiles.rule]) if known else None


def _band_keys(q, q_data, params):  # type: ignore[no-untyped-def]
    return q - params[0], q + params[1]


def _since_keys(q, q_data, params):  # type: ignore[no-untyped-def]
    return q_data, q


def _band_queries(k, params):  # type: ignore[no-untyped-def]
    return k - params[1], k + params[0]


KEYS = {
    "hone.ops.attention.masks:_band": f"{__name__}:_band_keys",
    "hone.ops.attention.masks:_since": f"{__name__}:_since_keys",
    "hone.ops.attention.masks:_causal_from": f"{__name__}:_since_keys",
}
QUERIES = {"hone.ops.attention.masks:_band": f"{__name__}:_band_queries"}
