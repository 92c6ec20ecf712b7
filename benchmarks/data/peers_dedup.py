"""The peers' deduplication of the benchmark's shards: run by an interpreter that has them, apart from hone.

    python peers_dedup.py {rensa,datasketch,datatrove} FOLDER OUT.json

Writes {"seconds": process CPU time, "extra_megabytes": peak above the loaded libraries, "stands": group of each document}.
All take 5-word shingles, 14 bands of 8 hashes; words are those of \\w+, except datatrove's, which has its own tokenizer.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_WORD = re.compile(r"\w+")
_BANDS, _ROWS, _WORDS = 14, 8, 5


def texts(folder: Path) -> Iterator[str]:
    """The documents of all shards in order."""
    import pyarrow.parquet as parquet

    for shard in sorted(folder.glob("[0-9].parquet")):
        for batch in parquet.ParquetFile(shard).iter_batches(columns=["text"], batch_size=1000):
            for text in batch.column(0):
                yield text.as_py()


def shingles(text: str) -> list[str]:
    """Runs of five words."""
    words = _WORD.findall(text.lower())
    n = max(min(_WORDS, len(words)), 1)
    return [" ".join(words[first : first + n]) for first in range(len(words) - n + 1)] if words else []


def groups(count: int, matches: Iterator[tuple[int, list[int]]]) -> list[int]:
    """Union-find over (document, documents that look like it)."""
    parents = list(range(count))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for one, others in matches:
        for other in others:
            a, b = root(one), root(other)
            parents[max(a, b)] = min(a, b)
    return [root(node) for node in range(count)]


def rensa(folder: Path) -> list[int]:
    """Its RMinHash objects and LSH."""
    from rensa import RMinHash, RMinHashLSH

    made = []
    for text in texts(folder):
        made.append(RMinHash(_BANDS * _ROWS, 1))
        made[-1].update(shingles(text))
    index = RMinHashLSH(threshold=0.72, num_perm=_BANDS * _ROWS, num_bands=_BANDS)
    index.insert_many(made)
    return groups(len(made), enumerate(index.query_all(made)))


def datasketch(folder: Path) -> list[int]:
    """Its MinHash with a fast hash and batch updates, and its LSH."""
    import xxhash
    from datasketch import MinHash, MinHashLSH

    first = MinHash(_BANDS * _ROWS, seed=1, hashfunc=xxhash.xxh32_intdigest)
    index = MinHashLSH(num_perm=_BANDS * _ROWS, params=(_BANDS, _ROWS))
    made = []
    for number, text in enumerate(texts(folder)):
        sketch = first.copy()
        runs = shingles(text)
        if runs:
            sketch.update_batch([run.encode() for run in runs])
            index.insert(number, sketch)
            made.append((number, sketch))
    return groups(number + 1, ((number, index.query(sketch)) for number, sketch in made))


def datatrove(folder: Path) -> list[int]:
    """Its four stages, one after the other in this process."""
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.readers import ParquetReader

    shards = sorted(folder.glob("[0-9].parquet"))
    config = MinhashConfig(n_grams=_WORDS, num_buckets=_BANDS, hashes_per_bucket=_ROWS)
    sizes = []
    with tempfile.TemporaryDirectory() as name:
        for rank in range(len(shards)):
            reader = ParquetReader(str(folder), glob_pattern="[0-9].parquet")
            sizes.append(0)

            def counted(documents, rank=rank):
                for document in documents:
                    sizes[rank] += 1
                    yield document

            step = MinhashDedupSignature(f"{name}/signatures", config)
            step.run(counted(reader.run(None, rank, len(shards))), rank, len(shards))
        for rank in range(_BANDS):
            MinhashDedupBuckets(f"{name}/signatures", f"{name}/buckets", config=config).run(None, rank, _BANDS)
        MinhashDedupCluster(f"{name}/buckets", f"{name}/removed", config, save_cluster_id=True).run(None, 0, 1)
        for rank in range(len(shards)):
            reader = ParquetReader(str(folder), glob_pattern="[0-9].parquet")
            for _ in MinhashDedupFilter(f"{name}/removed").run(reader.run(None, rank, len(shards)), rank, len(shards)):
                pass
        stands = list(range(sum(sizes)))
        first_of: dict[int, int] = {}
        for rank in range(len(shards)):
            path = Path(name) / "removed" / f"{rank:06d}.clusters"
            for place, cluster in struct.iter_unpack("<2I", path.read_bytes() if path.exists() else b""):
                document = sum(sizes[:rank]) + place
                stands[document] = first_of.setdefault(cluster, document)
        return stands


def peak_kilobytes() -> int:
    """Peak resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def main() -> None:
    """Runs one peer and writes its result."""
    peer, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for _ in texts(folder):  # loads libraries and files
        break
    before = peak_kilobytes()
    start = time.process_time()
    stands = {"rensa": rensa, "datasketch": datasketch, "datatrove": datatrove}[peer](folder)
    seconds = time.process_time() - start
    extra = (peak_kilobytes() - before) / 1e3
    out.write_text(json.dumps({"seconds": seconds, "extra_megabytes": extra, "stands": stands}))


if __name__ == "__main__":
    main()
