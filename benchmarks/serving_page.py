"""The parts of docs/serving.md that the code decides, metrics and sizes: `python -m benchmarks.serving_page`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serve import SHAPES
from benchmarks.serve_load import load_of
from hone.base.figure import human_bytes
from hone.cost.serve.schedule import Traffic
from hone.model.facts import CheckpointFacts
from hone.serve.http.metrics import MEANINGS, ServerMetrics
from hone.serve.planning import estimates, of_a_rank, pages_bytes
from hone.serve.sizing import DeviceMemory, cache_pages, sized, work_bytes
from hone.serve.spec import EngineSpec
from tests.cost.h200 import h200

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
COMMAND = "python -m benchmarks.serving_page"


def metrics() -> list[tuple[str, str, str]]:
    """(name, kind, meaning) of every metric of a server with every figure that has a meaning."""
    return ServerMetrics("model", lambda: dict.fromkeys(MEANINGS, 0.0)).described()


def metrics_table() -> str:
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {kind} | {meaning.removesuffix('.')} |" for name, kind, meaning in metrics()]
    return "\n".join(rows) + "\n"


def sizes() -> str:
    """The line of sizes of Llama-3-8B on an H200, and its parts on one and on two."""
    lines, parts = [], {"one GPU": 1, "each of two (`tensor_parallel_size=2`)": 2}
    rows = [f"| Llama-3-8B, bf16, H200 | {' | '.join(parts)} |", "|---|---|---|"]
    columns = []
    for count in parts.values():
        spec = sized(EngineSpec(tensor_parallel_size=count), h200())
        model = of_a_rank(spec, _facts())
        page, weights = pages_bytes(spec, [model]), model.loaded_bytes("bfloat16")
        work = work_bytes(model.config.dims(), spec, "bfloat16", "cuda")
        longest = _facts().config.max_seq_len
        pages = cache_pages(spec, page, DeviceMemory.of(h200()), longest, weights=weights, work=work)
        tokens, seqs = pages * spec.block_size, spec.max_num_seqs
        assert seqs is not None, "sized() fills it in"
        lines.append(
            f"max_num_seqs={seqs} max_num_batched_tokens={spec.max_num_batched_tokens} max_model_len={longest}; "
            f"KV cache of {human_bytes((pages + 1) * page)} in bfloat16: {pages} pages of {spec.block_size} tokens"
        )
        cells = (
            human_bytes(weights),
            human_bytes(work),
            human_bytes(pages * page),
            f"{tokens:,}",
            f"{tokens // seqs:,}",
        )
        columns.append(cells)
    names = (
        "weights",
        "work of one step",
        "KV cache",
        "tokens in the cache",
        "the same for each of `max_num_seqs` sequences",
    )
    rows += [f"| {name} | {' | '.join(cells)} |" for name, *cells in zip(names, *columns)]
    return f"    {lines[0]}\n\n" + "\n".join(rows) + "\n"


def speeds() -> str:
    """Estimates for the load "throughput" of benchmarks.serve_load by the most sequences of a step."""
    load = load_of("throughput", 128256)
    traffic = Traffic(tuple(map(len, load.prompts)), tuple(load.outputs), 0, len(load.prompts))
    rows = ["| `max_num_seqs` | output tokens/s | ms between two tokens of a client, about |", "|---|---|---|"]
    for seqs in (64, 256, 512):
        found = estimates(EngineSpec(max_num_seqs=seqs), traffic, [_facts()], h200())["tokens_per_s"].value
        rows.append(f"| {seqs} | {round(found, -2):,.0f} | {1e3 * seqs / found:.0f} |")
    return "\n".join(rows) + "\n"


def _facts() -> CheckpointFacts:
    shape, vocab_size = SHAPES["llama3-8b"]
    config = shape.config(vocab_size, None, 0)
    return CheckpointFacts(
        where="llama3-8b", config=config, dtype="bfloat16", weights_bytes=2 * config.num_params, tokenizer=None
    )


PARTS = {"metrics": metrics_table, "sizes": sizes, "speeds": speeds}


def marks(name: str) -> tuple[str, str]:
    """The lines around a part."""
    return f"<!-- {name}: {COMMAND} -->\n", f"<!-- end of {name} -->\n"


def filled(text: str) -> str:
    """`text` with every part made again."""
    for name, part in PARTS.items():
        begin, end = marks(name)
        assert begin in text and end in text, f"docs/serving.md has no place for {name}"
        before, _, rest = text.partition(begin)
        text = before + begin + part() + end + rest.partition(end)[2]
    return text


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf8")), encoding="utf8")


if __name__ == "__main__":
    main()
