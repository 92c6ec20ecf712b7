"""Mixtures and curricula: rank correlation of small runs with large ones, distance of weights to the optimum, cost of drawing rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.data.clock import best_of
from hone.feed import CURRICULA
from hone.feed.load import PackedTokens
from hone.feed.mix.mixed import MixedTokens, Shares
from hone.feed.mix.regmix import fit, read_runs, spearman
from hone.feed.mix.simplex import fill
from hone.feed.mix.sources import by_column
from hone.feed.mix.utilimax import best_portfolio


def rows(data: Path, peers: str | None = None) -> list[dict[str, Any]]:
    """The rows of this benchmark; the peer, scipy, runs in this process."""
    found = [*regression(data / "mixture" / "regmix"), *portfolio(), *shares()]
    with tempfile.TemporaryDirectory() as name:
        packed = _artifact(Path(name))
        return [*found, *drawing(packed), *orders(packed)]


def regression(folder: Path) -> list[dict[str, Any]]:
    """Rank correlation of the losses predicted from 512 published runs of 1M parameters with those of larger models."""
    known = read_runs(folder / "train_mixture_1m.csv", folder / "train_pile_loss_1m.csv", "pile_cc")
    weights = known.weights / known.weights.sum(1, keepdims=True)
    spent, predict = best_of(3, lambda: fit(weights, known.loss, "boosting"))
    result = [_row("regmix_fit_s", spent, "s", 3, "", None, "512 runs, 17 sources, 300 trees; process CPU time")]
    for size in ("1m", "60m", "1B"):
        asked = read_runs(folder / f"test_mixture_{size}.csv", folder / f"test_pile_loss_{size}.csv", "pile_cc")
        scaled = asked.weights / asked.weights.sum(1, keepdims=True)
        ours = spearman(predict(scaled), asked.loss)
        note = f"Spearman over {len(asked.loss)} published runs, loss on Pile-CC"
        result.append(_row(f"regmix_rank_correlation_{size}", ours, "", len(asked.loss), "", None, note))
    return result


def portfolio() -> list[dict[str, Any]]:
    """UtiliMax of random utilities against a general solver."""
    draw = np.random.default_rng(0)
    cases = [(draw.random((15, 30)), np.minimum(draw.random(15) * 0.5 + 0.07, 1)) for _ in range(20)]

    def value(w: np.ndarray, utility: np.ndarray) -> float:
        return float(np.linalg.norm(w @ utility - 1) + len(w) * (w @ w))

    spent, ours = best_of(3, lambda: [best_portfolio(utility, caps, 1.0) for utility, caps in cases])

    def solve(utility: np.ndarray, caps: np.ndarray) -> np.ndarray:
        return minimize(
            value,
            fill(np.ones(15), caps),
            args=(utility,),
            method="SLSQP",
            bounds=[(0, cap) for cap in caps],
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-12, "maxiter": 2000},
        ).x

    peer_spent, theirs = best_of(2, lambda: [solve(*case) for case in cases])
    worst = max(value(a, case[0]) - value(b, case[0]) for a, b, case in zip(ours, theirs, cases))
    note = "15 sources, 30 tasks, risk 1; process CPU time"
    return [
        _row("utilimax_ms", spent / 20 * 1e3, "ms", 20, "scipy SLSQP", peer_spent / 20 * 1e3, note),
        _row(
            "utilimax_above_slsqp", worst, "", 20, "", None, "largest difference of the value minimised, ours - scipy's"
        ),
    ]


def shares() -> list[dict[str, Any]]:
    """Largest deviation of the drawn rows from their shares in ten million draws, over all moments and sources."""
    count = 10_000_000
    weights = np.random.default_rng(1).dirichlet(np.ones(12))
    found = Shares(weights, 0).sources(np.arange(count))
    independent = np.random.default_rng(2).choice(12, count, p=weights)
    due = np.arange(1, count + 1)
    off = [
        max(float(np.abs(np.cumsum(drawn == number) - due * weight).max()) for number, weight in enumerate(weights))
        for drawn in (found, independent)
    ]
    note = "12 sources, worst of all moments and sources"
    return [_row("mixture_rows_off_share", off[0], "rows", count, "independent draws", off[1], note)]


def drawing(packed: PackedTokens) -> list[dict[str, Any]]:
    """Batches of 64 rows of 1024 tokens, from one stream and from a mixture of its four groups."""
    mixed = MixedTokens(by_column(packed, "group"), {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1})
    rates = []
    for feed in (mixed, packed):
        feed.batch(0, 64, 1024, 0)
        spent, _ = best_of(3, lambda feed=feed: [feed.batch(step, 64, 1024, 0) for step in range(5, 15)])
        rates.append(10 * 64 * 1024 / spent / 1e6)
    note = "64 rows of 1024, 4 groups of one artifact read as streams; process CPU time of one thread"
    return [_row("mixture_tokens_per_s", rates[0], "M tokens/s", 3, "one stream, unmixed", rates[1], note)]


def orders(packed: PackedTokens) -> list[dict[str, Any]]:
    """Seconds until the first batch of a training of one epoch, a million rows, is known."""
    result = []
    seq_len = packed.num_tokens // 1_000_000
    total = packed.num_sequences(seq_len)
    for name in CURRICULA:
        curriculum = CURRICULA.read(name)
        spent, _ = best_of(2, lambda c=curriculum: c.order(packed, seq_len, total, 0)(np.arange(64)))
        note = f"{total} rows of {seq_len} tokens, {packed.num_documents} documents, reading their columns included"
        result.append(_row(f"curriculum_{name}_s", spent, "s", 2, "", None, note))
    return result


def _artifact(folder: Path) -> PackedTokens:
    """A data folder of 200,000 documents of random tokens with the columns that curricula read."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as parquet

    draw = np.random.default_rng(3)
    sizes = draw.integers(20, 400, 200_000)
    (folder / "tokens").mkdir()
    (folder / "documents").mkdir()
    starts = np.concatenate([[0], np.cumsum(sizes)])
    draw.integers(1, 50_000, int(starts[-1]), np.uint16).tofile(folder / "tokens" / "train.bin")
    np.save(folder / "tokens" / "train.starts.npy", starts)
    row = {"tokens": int(starts[-1]), "documents": len(sizes), "bytes": int(starts[-1]) * 4}
    meta = {"dtype": "uint16", "vocab_size": 50_000, "eos_token_id": 0, "splits": {"train": row}}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    columns = {
        "split": ["train"] * len(sizes),
        "bytes": sizes * 4,
        "compression_ratio": draw.gamma(3, 1, len(sizes)),
        "group": np.array(list("abcd"))[draw.integers(0, 4, len(sizes))],
    }
    parquet.write_table(pa.table(columns), folder / "documents" / "00000.parquet")
    return PackedTokens(folder)


def _row(
    figure: str, value: float, unit: str, n: int, peer: str, peer_value: float | None, note: str
) -> dict[str, Any]:
    return {
        "figure": figure,
        "value": value,
        "unit": unit,
        "n": n,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": None if not peer_value else value / peer_value,
        "note": note,
    }
