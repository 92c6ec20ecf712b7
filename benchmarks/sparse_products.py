"""2:4 sparse products beside dense ones at the shapes of an 8B model, and a served model with both: `python -m benchmarks.sparse_products`.

One H200, under a minute. Products: microseconds by replayed CUDA graphs, every call on another copy of the weight, so that
nothing comes from a cache; each is first compared with the dense product of the same weight. `sparse_linear` runs hone's kernel
up to 64 rows and torch's (cuSPARSELt) above; `cuSPARSELt tuned` has the algorithm that its own search finds. fp8 products have
one scale a tensor and no rounding of x in their time. Serving: decode steps of a random model with some layers of Llama-3-8B at
batch 1 and 64, and prefill. A variant that fails prints its error and the others go on. Rows go to
benchmarks/ledger/sparse.jsonl after each section, the libraries' first, in case hone's kernel takes the process with it; `--page`
writes them to docs/compression.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ledger
from benchmarks.kernels.timing import median_seconds
from hone.ops import sparse_linear
from hone.ops.linear.sparse import Sparse24, compress_24

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 16, 64, 128, 256, 1024, 4096)
OWN_ROWS = (1, 16, 64, 128, 256)
"""Those of hone's kernel; `sparse_linear` runs it up to 64, and the others say whether that is the right place to stop."""
SPREAD_BYTES = 240e6
"""Bytes of all copies of a weight, several times an H200's cache."""
FP8 = torch.float8_e4m3fn
DENSE, OWN = "bf16 dense", "bf16 2:4 hone's kernel"

PAGE = Path(__file__).parent.parent / "docs" / "compression.md"
BEGIN, END = "<!-- sparse -->\n", "<!-- end sparse -->"


def prune(weight: Tensor) -> Tensor:
    """`weight` with the two smallest of every four columns set to zero, in place."""
    fours = weight.view(-1, 4)
    fours.scatter_(1, fours.abs().topk(2, 1, largest=False).indices, 0)
    return weight


class Weights:
    """Copies of one 2:4 weight in every form."""

    def __init__(self, features: int, columns: int) -> None:
        first = prune(torch.randn(features, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5)
        count = max(1, round(SPREAD_BYTES / first.nbytes))
        self.dense = [first, *(first.clone() for _ in range(count - 1))]
        self.packed: list[Sparse24] = [compress_24(weight) for weight in self.dense]
        self.scale = float(first.abs().max()) / 448
        codes = (first / self.scale).to(FP8)
        self.codes = [codes.clone() for _ in self.dense]
        self.packed_codes: list[Tensor] = []
        try:
            self.packed_codes = [torch._cslt_compress(one) for one in self.codes]
        except RuntimeError as error:
            print(f"  fp8 2:4 cannot be compressed: {_line(error)}", flush=True)


Product = Callable[[int], Tensor]
"""The product with copy i of a weight."""


def own(weights: Weights, x: Tensor) -> dict[str, tuple[Product, float]]:
    """The dense product and hone's kernel, each with the largest relative error that it may have."""
    return {
        DENSE: (lambda i: torch.mm(x, weights.dense[i].T), 0.01),
        OWN: (lambda i: sparse_linear(x, weights.packed[i], backend="gluon"), 0.01),
    }


def libraries(weights: Weights, x: Tensor) -> dict[str, tuple[Product, float]]:
    """The products of torch, each with the largest relative error that it may have."""
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % 16))
    x_scale = float(x.abs().max()) / 448
    codes = (padded / x_scale).to(FP8)
    one = [torch.tensor(value, device="cuda") for value in (x_scale, weights.scale)]
    alpha = torch.tensor([x_scale * weights.scale], device="cuda")
    found: dict[str, tuple[Product, float]] = {
        DENSE: (lambda i: torch.mm(x, weights.dense[i].T), 0.01),
        "bf16 2:4 cuSPARSELt": (lambda i: sparse_linear(x, weights.packed[i], backend="torch"), 0.01),
        "fp8 dense": (
            lambda i: torch._scaled_mm(
                codes, weights.codes[i].T, one[0], one[1], out_dtype=torch.bfloat16, use_fast_accum=True
            )[:rows],
            0.1,
        ),
    }
    packed = [one.library for one in weights.packed]
    if getattr(packed[0], "BACKEND", "") == "cusparselt" and rows in (16, 1024):
        best = int(torch._cslt_sparse_mm_search(packed[0].packed, padded.T, transpose_result=True))
        found["bf16 2:4 cuSPARSELt tuned"] = (
            lambda i: torch._cslt_sparse_mm(packed[i].packed, padded.T, transpose_result=True, alg_id=best)[:rows],
            0.01,
        )
    if weights.packed_codes:
        found["fp8 2:4 cuSPARSELt"] = (
            lambda i: torch._cslt_sparse_mm(
                weights.packed_codes[i], codes.T, alpha=alpha, out_dtype=torch.bfloat16, transpose_result=True
            )[:rows],
            0.1,
        )
    return found


def products(
    choices: Callable[..., dict[str, tuple[Product, float]]], counts: tuple[int, ...], deadline: float
) -> list[dict[str, Any]]:
    """Rows of every shape, number of rows and one of `choices`, until `deadline` (time.perf_counter)."""
    made: list[dict[str, Any]] = []
    for name, (features, columns) in SHAPES.items():
        try:
            weights = Weights(features, columns)
        except Exception as error:
            print(f"{name}: {_line(error)}", flush=True)
            continue
        for rows in counts:
            if time.perf_counter() > deadline:
                print(f"{name} M {rows} and later: not measured, the time is up", flush=True)
                return made
            made += _one_size(f"{name} {features} x {columns}, M {rows}", weights, rows, choices)
        del weights
        torch.cuda.empty_cache()
    return made


def _one_size(name: str, weights: Weights, rows: int, choices: Callable[..., Any]) -> list[dict[str, Any]]:
    """Rows of one shape and number of rows; the dense product is the peer of all."""
    x = torch.randn(rows, weights.dense[0].shape[1], device="cuda", dtype=torch.bfloat16)
    wanted, dense_s, made = torch.mm(x, weights.dense[0].T).float(), None, []
    try:
        found = choices(weights, x)
    except Exception as error:
        print(f"{name}: {_line(error)}", flush=True)
        return []
    for variant, (product, bound) in found.items():
        try:
            error = float((product(0).float() - wanted).norm() / wanted.norm())
            if not error < bound:
                raise ValueError(f"the result is off by {error:.3g}, more than {bound}")
            taken = _seconds(product, len(weights.dense))
        except Exception as error:
            print(f"  {name}: {variant}: failed: {_line(error)}", flush=True)
            continue
        if variant == DENSE:
            dense_s = taken
        row = {"figure": f"{name}: {variant}", "value": 1e6 * taken, "unit": "us", "n": 1}
        if dense_s is not None and variant != DENSE:
            row |= {"peer": "torch.mm", "peer_value": 1e6 * dense_s, "ratio": dense_s / taken}
        if (variant, rows) == (OWN, 16) and name.startswith("gate_up"):
            row["technique"] = "linear/semi_structured"
        made.append(row)
        print(f"  {row['figure']}: {row['value']:.1f} us, {row.get('ratio', 1.0):.2f} x dense", flush=True)
    return made


def _seconds(product: Callable[[int], Tensor], copies: int) -> float:
    """Median seconds a call, in a CUDA graph, or launched one by one where the capture fails (which is said)."""

    def run() -> None:
        for i in range(copies):
            product(i)

    try:
        return median_seconds(run, calls=copies, min_time_s=0.02)
    except RuntimeError as error:
        print(f"    no CUDA graph: {_line(error)}", flush=True)
        torch.cuda.synchronize()
        return median_seconds(run, captured=False, calls=copies, min_time_s=0.02)


def served(num_layers: int) -> list[dict[str, Any]]:
    """Decode steps at batch 1 and 64 and prefill of a random 2:4 model, dense and compressed."""
    from benchmarks.serve import SHAPES as MODELS
    from benchmarks.serve import Bench, random_model
    from hone.model.sparse.sparsify import sparsify
    from hone.serve.engine import Engine, EngineSpec

    config = MODELS["llama3-8b"][0].model_copy(update={"num_layers": num_layers}).config(32000, None, 0)
    model = random_model(config, "cuda", torch.bfloat16)
    for index, layer in enumerate(model.layers):
        for path in config.linears(index):
            prune(layer.get_submodule(path).weight.detach())
    args = argparse.Namespace(
        shape=f"llama3-8b, {num_layers} layers", device="cuda", context=512, tokens=24, seconds=4.0, batches=[1, 64]
    )
    spec = EngineSpec(max_num_seqs=64, max_num_batched_tokens=8192, kv_cache_memory_bytes=2 << 30, max_model_len=2048)
    seconds: dict[str, dict[str, float]] = {}
    for mode in ("dense", "2:4"):
        if mode == "2:4":
            print(f"  {sparsify(model, '2:4').said}", flush=True)
        bench = Bench(config, args)
        bench.model, bench.engine = model, Engine(model, spec, device="cuda")
        seconds[mode] = {}
        for batch in args.batches:
            step_s, _, _ = bench._steps(batch)
            seconds[mode][f"decode step, batch {batch}"] = step_s
        prompts = [[1 + (place + seq) % 31999 for place in range(1024)] for seq in range(16)]
        bench._drive(prompts[:2], [1, 1])  # compiles
        seconds[mode]["prefill, 16 x 1024 tokens"] = bench._drive(prompts, [1] * len(prompts))[0]
        del bench
        torch.cuda.empty_cache()
    made = []
    for figure, taken in seconds.get("2:4", {}).items():
        dense = seconds["dense"][figure]
        row = {"figure": f"served {args.shape}: {figure}: 2:4", "value": 1e3 * taken, "unit": "ms", "n": 1}
        made.append(row | {"peer": "dense", "peer_value": 1e3 * dense, "ratio": dense / taken})
        print(f"  {row['figure']}: {1e3 * taken:.3f} ms, dense {1e3 * dense:.3f} ms: {dense / taken:.2f} x", flush=True)
    return made


def timed_choice() -> None:
    """What `sparsity: auto` chooses for one layer, at 1 and 64 rows; printed alone."""
    from benchmarks.serve import SHAPES as MODELS
    from benchmarks.serve import random_model
    from hone.model.sparse.sparsify import sparsify

    config = MODELS["llama3-8b"][0].model_copy(update={"num_layers": 1}).config(1000, None, 0)
    for rows in (1, 64):
        model = random_model(config, "cuda", torch.bfloat16)
        for path in config.linears(0):
            prune(model.layers[0].get_submodule(path).weight.detach())
        print(f"  auto, {rows} rows: {sparsify(model, 'auto', rows=rows).said}", flush=True)


def page(rows: list[dict[str, Any]]) -> str:
    """The tables of docs/compression.md: times as fast as the dense product, and the served model."""
    newest = {row["figure"]: row for row in rows}
    if not newest:
        return "Not measured yet.\n"
    lines = [
        "| times as fast as bf16 dense, M = | " + " | ".join(map(str, ROWS)) + " |",
        "|---" * (len(ROWS) + 1) + "|",
    ]
    kinds = (OWN, "bf16 2:4 cuSPARSELt", "bf16 2:4 cuSPARSELt tuned", "fp8 dense", "fp8 2:4 cuSPARSELt")
    for name, (features, columns) in SHAPES.items():
        for kind in kinds:
            found = [newest.get(f"{name} {features} x {columns}, M {count}: {kind}") for count in ROWS]
            if any(found):
                cells = [f"{row['ratio']:.2f}" if row and row.get("ratio") else "-" for row in found]
                lines.append(f"| {name} {features} x {columns}, {kind} | " + " | ".join(cells) + " |")
    served = {figure: row for figure, row in newest.items() if figure.startswith("served ")}
    if served:
        lines += ["", "| served | 2:4, ms | dense, ms | times as fast |", "|---|---|---|---|"]
    for figure, row in served.items():
        shown = figure.removeprefix("served ").removesuffix(": 2:4")
        lines.append(f"| {shown} | {row['value']:.3g} | {row['peer_value']:.3g} | {row['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def measured() -> list[dict[str, Any]]:
    """Every row of the ledger."""
    path = ledger.FOLDER / "sparse.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()] if path.exists() else []


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="no section starts after this many")
    parser.add_argument("--layers", type=int, default=3, help="layers of the served model")
    parser.add_argument("--no-ledger", action="store_true", help="print without writing the ledger")
    parser.add_argument(
        "--page", action="store_true", help="write docs/compression.md from the ledger, measure nothing"
    )
    args = parser.parse_args()
    if args.page:
        ledger.put_between(PAGE, BEGIN, END, page(measured()))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device\nfix: run this on a GPU of compute capability 9.0")
    begun = time.perf_counter()
    torch.manual_seed(0)
    sections: tuple[tuple[str, Callable[[], list[dict[str, Any]] | None]], ...] = (
        ("libraries", lambda: products(libraries, ROWS, begun + 0.5 * args.seconds)),
        ("kernel", lambda: products(own, OWN_ROWS, begun + 0.8 * args.seconds)),
        ("served", lambda: served(args.layers)),
        ("auto", timed_choice),
    )
    with torch.no_grad():
        for name, section in sections:
            print(f"{name}:", flush=True)
            try:
                rows = section() if time.perf_counter() - begun < args.seconds else None
            except Exception as error:
                print(f"  {name} failed: {_line(error)}", flush=True)
                continue
            if rows and not args.no_ledger:
                ledger.append("sparse", rows, "cuda")
            print(f"  {name}: {time.perf_counter() - begun:.1f} s since the start", flush=True)


if __name__ == "__main__":
    main()
