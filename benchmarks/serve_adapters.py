"""Many LoRA adapters over one model: `python -m benchmarks.serve_adapters --device cuda --shape llama3-8b --adapters 0,1,8,32`.

Random weights; --batch sequences decode --tokens tokens each, sequence i with adapter i modulo --adapters (0: none). Every number of
adapters runs once a round, one after another (ABAB), in one engine. Printed and kept in ledger/serve.jsonl: ms a token of the whole
batch, its ratio to the engine without adapters, and the time of a step at the 99th percentile while an adapter is loaded from disk
and asked for. `--peer vllm` (with --peer-python and --peer-path) runs the same requests in vLLM afterwards. On a GPU the kernels are
first compared with plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ledger import append, table
from benchmarks.serve_peer import PYTHON, ROOT, folder_of, run_to_end

Times = dict[int, list[float]]
"""By the number of adapters: ms a token of the whole batch, a number a round."""
WANTED = {1: 0.97, 8: 0.93, 32: 0.85}
"""Part of the speed without adapters that must stay."""


def adapter_in(folder: Path, model: Path, rank: int) -> Path:
    """A PEFT folder of random factors for every linear of the layers of `model`."""
    import torch
    from safetensors.torch import save_file

    from hone.model.families.stored import read_config
    from hone.model.weights.tensors import layer_modules

    config = read_config(model)[1]
    folder.mkdir()
    tensors = {}
    for index in range(config.num_layers):
        for module in layer_modules(config, index):
            key = f"base_model.model.{module.name}"
            rows = module.rows.stop - module.rows.start
            for name, shape in (("lora_A", (rank, module.linear.in_features)), ("lora_B", (rows, rank))):
                tensors[f"{key}.{name}.weight"] = (torch.randn(shape) * 0.02).bfloat16()
    names = sorted({key.split(".")[-3] for key in tensors})
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values | {"base_model_name_or_path": str(model)}))
    return folder


def rounds_of(args: argparse.Namespace, generate: Callable[[list[list[int]], int, int], float]) -> Times:
    """`generate(prompts, tokens, adapters)` gives seconds; a token's time is what more tokens take, divided by them."""
    drawn = random.Random(0)
    found: Times = {}
    for turn in range(args.rounds + 1):  # the first warms up: kernels, graphs, adapters
        for count in args.counts:
            prompts = [[drawn.randrange(3, 2000) for _ in range(args.context)] for _ in range(args.batch)]
            few = generate(prompts, 1, count)
            long = generate([prompt[::-1] for prompt in prompts], 1 + args.tokens, count)
            taken = (long - few) / args.tokens * 1e3
            print(f"  {count} adapters: {taken:.3f} ms/token{'' if turn else ' while it warms up'}", flush=True)
            if turn:
                found.setdefault(count, []).append(taken)
    return found


def of_hone(args: argparse.Namespace, folder: Path, adapter: Path) -> dict[str, Any]:
    """Times of this engine, and those of its steps while an adapter is loaded."""
    from hone.serve.engine import Engine, EngineSpec
    from hone.serve.request import SamplingParams

    if args.device != "cpu" and not args.no_check:
        check_kernels(args.rank)
    lora = {"max_loras": max(1, *args.counts), "max_lora_rank": args.rank}
    sizes = {"max_num_seqs": args.batch + 1, "max_num_batched_tokens": 8192, "lora": lora}
    engine = Engine(folder, EngineSpec.read({"load_format": "dummy", **sizes}), device=args.device)
    print(engine.sizes, flush=True)
    begun = time.monotonic()
    if max(args.counts):
        host = engine.adapters.read("0", str(adapter))
        print(f"reading an adapter took {time.monotonic() - begun:.2f} s", flush=True)
        for index in range(max(args.counts)):  # each in a slot of its own, all with these numbers
            engine.adapters.add(replace(host, name=str(index)))

    def generate(prompts: list[list[int]], tokens: int, count: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        names = [str(index % count) if count else "" for index in range(len(prompts))]
        begun = time.perf_counter()
        engine.generate(prompts, params, adapters=names)
        return time.perf_counter() - begun

    times = rounds_of(args, generate)
    return {"times": times, "p99": [steps_while_loading(args, engine, adapter, loads) for loads in (False, True) * 2]}


def steps_while_loading(args: argparse.Namespace, engine: Any, adapter: Path, loads: bool) -> dict[str, float]:
    """The steps' times (ms) of a batch of half the adapters that decodes, and in the middle of it a new adapter comes or does not."""
    from hone.serve.request import Request, SamplingParams

    params, drawn = SamplingParams(max_tokens=4 * args.tokens, ignore_eos=True), random.Random(1)
    count = max(1, max(args.counts) // 2)
    for index in range(args.batch):
        prompt = [drawn.randrange(3, 2000) for _ in range(args.context)]
        engine.add(Request(f"steady {index}", prompt, params, adapter=str(index % count) if max(args.counts) else ""))
    loaded: list[Any] = []
    reader = threading.Thread(target=lambda: loaded.append(engine.adapters.read("new", str(adapter))))
    took: list[float] = []
    while engine.has_work:
        if loads and len(took) == args.tokens:
            reader.start()
        if loaded:
            engine.adapters.add(loaded.pop())
            engine.add(Request("new", [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True), adapter="new"))
        begun = time.perf_counter()
        engine.step()
        took.append((time.perf_counter() - begun) * 1e3)
    if loads:
        reader.join()
        if "new" in engine.adapters.names():
            engine.adapters.remove("new")
    steady = sorted(took[args.tokens // 2 :])
    found = {"p50": steady[len(steady) // 2], "p99": steady[int(len(steady) * 0.99)], "longest": steady[-1]}
    print(f"  steps {'while one is loaded' if loads else 'without a load'}: {found}", flush=True)
    return {"loads": loads, **found}


def check_kernels(rank: int) -> None:
    """Prints how far the kernels are from plain torch in float32, at the shapes of an 8B model."""
    import torch

    from hone.ops import lora_expand, lora_shrink, slotted_linear

    torch.manual_seed(0)
    room = -(-rank // 16) * 16
    for rows in (1, 32, 200, 4096):
        for columns, widths in ((4096, (4096, 1024, 1024)), (14336, (4096,))):
            x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            downs = torch.randn(8, len(widths) * room, columns, device="cuda", dtype=torch.bfloat16) * 0.02
            ups = torch.randn(8, sum(widths), room, device="cuda", dtype=torch.bfloat16)
            slots = torch.randint(-1, 8, (rows,), device="cuda", dtype=torch.int32)
            ranks = torch.full((8, len(widths)), rank, device="cuda", dtype=torch.int32)
            y = torch.randn(rows, sum(widths), device="cuda", dtype=torch.bfloat16)
            ours = lora_expand(lora_shrink(x, downs, slots, ranks), ups, slots, ranks, y.clone(), widths)
            wide = (downs.float(), ups.float())
            narrow = lora_shrink(x.float(), wide[0], slots, ranks, backend="reference")
            plain = lora_expand(narrow, wide[1], slots, ranks, y.float(), widths, backend="reference")
            weight = torch.randn(sum(widths), columns, device="cuda", dtype=torch.bfloat16) * 0.02
            whole = slotted_linear(x, weight, None, downs, ups, slots, ranks, widths)
            wanted = plain - y.float() + x.float() @ weight.float().T
            for name, found, right in (("added to y", ours, plain), ("with the base's product", whole, wanted)):
                off = float((found.float() - right).norm() / right.norm())
                print(f"  kernels, {rows} rows of {columns}, {name}: {off:.1e} off plain torch in float32", flush=True)
                assert off < 1e-2, "the kernels are wrong"


def of_vllm(args: argparse.Namespace, folder: Path, adapter: Path) -> dict[str, Any]:
    """The same requests in vLLM, in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    slots = max(1, *args.counts)
    llm = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192, seed=0,
        gpu_memory_utilization=0.85, max_num_seqs=args.batch + 1, enable_lora=True, max_loras=slots, max_cpu_loras=slots,
        max_lora_rank=next(one for one in (8, 16, 32, 64, 128, 256, 320, 512) if one >= args.rank),  # what it takes
    )  # fmt: skip
    loras = [LoRARequest(f"a{index}", index + 1, str(adapter)) for index in range(slots)]

    def generate(prompts: list[list[int]], tokens: int, count: int) -> float:
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        asked = [loras[index % count] for index in range(len(prompts))] if count else None
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": one} for one in prompts], params, lora_request=asked, use_tqdm=False)
        return time.perf_counter() - begun

    return {"times": rounds_of(args, generate)}


def rows_of(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the ledger of what both engines measured."""
    rows = []
    for engine, one in found.items():
        medians = {int(count): statistics.median(times) for count, times in one["times"].items()}
        for count, value in medians.items():
            row = {
                "figure": f"{args.shape}, rank {args.rank}, batch {args.batch}: {engine}, {count} adapters",
                "value": value, "unit": "ms/token", "n": args.rounds, "order": "ABAB",
                "spread": max(one["times"][count]) - min(one["times"][count]),
            }  # fmt: skip
            if 0 in medians and count:
                row |= {"speed_of_base": medians[0] / value, "wanted": WANTED.get(count)}
            rows.append(row)
        steps = one.get("p99", [])
        if steps:
            p99 = {
                loads: statistics.median(line["p99"] for line in steps if line["loads"] is loads)
                for loads in (False, True)
            }
            longest = max(line["longest"] for line in steps if line["loads"])
            rows.append({
                "figure": f"{args.shape}, batch {args.batch}: {engine}, p99 of a step while an adapter is loaded, less without",
                "value": p99[True] - p99[False], "unit": "ms", "n": 2, "p99_loading": p99[True], "longest_loading": longest,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", help="a name of benchmarks.serve.SHAPES")
    parser.add_argument("--adapters", default="0,1,8,32", help="numbers of adapters, each of which is measured")
    for name, value in (("rank", 16), ("batch", 32), ("context", 128), ("tokens", 128), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peer", default="none", choices=("none", "vllm"))
    parser.add_argument("--peer-python", default=PYTHON)
    parser.add_argument("--peer-path", default="", help="folders of vLLM's packages, first on its path")
    parser.add_argument("--seconds", type=float, default=250.0, help="most seconds of one engine")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="do not compare the kernels first")
    parser.add_argument("--leg", nargs=4, metavar=("ENGINE", "MODEL", "ADAPTER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.counts = [int(one) for one in args.adapters.split(",")]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.leg:
        engine, model, adapter, out = args.leg
        found = (of_hone if engine == "hone" else of_vllm)(args, Path(model), Path(adapter))
        Path(out).write_text(json.dumps(found))
        return
    told: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hone-adapters-") as work:
        folder = folder_of(args.shape, Path(work))
        adapter = adapter_in(Path(work) / "adapter", folder, args.rank)
        for engine in ("hone", *(() if args.peer == "none" else (args.peer,))):
            out, log = Path(work) / f"{engine}.json", Path(work) / f"{engine}.log"
            own = [
                f"--{name}={getattr(args, name)}"
                for name in ("device", "shape", "adapters", "rank", "batch", "context", "tokens", "rounds")
            ] + ["--no-check"] * args.no_check
            python = args.peer_python if engine == args.peer else PYTHON
            command = [
                python,
                "-m",
                "benchmarks.serve_adapters",
                *own,
                "--leg",
                engine,
                str(folder),
                str(adapter),
                str(out),
            ]
            parts = (str(ROOT), args.peer_path if engine == args.peer else "", os.environ.get("PYTHONPATH", ""))
            env = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in parts if part)}
            print(f"{engine}, at most {args.seconds:.0f} s", flush=True)
            wrong = run_to_end(command, env, log, args.seconds)
            print("\n".join(log.read_text(encoding="utf8", errors="replace").splitlines()[-60:]), flush=True)
            if wrong:
                print(f"{engine} {wrong[-300:]}", flush=True)
            if out.exists():
                one = json.loads(out.read_text())
                told[engine] = one | {"times": {int(count): times for count, times in one["times"].items()}}
    rows = rows_of(told, args)
    print(table(rows))
    if rows and not args.no_ledger:
        print(append("serve", rows, args.device))


if __name__ == "__main__":
    main()
