"""Engines on several GPUs of one host: `python -m benchmarks.serve_ranks --shape llama3-8b --ranks 2 4`.

Sections, each a process of its own with a deadline (`--seconds`), printed as it ends, one JSON line a figure:
- "reduce": the own all-reduce beside NCCL's, by bytes of the message, as replayed in a CUDA graph;
- "same": greedy tokens of a small saved model on 1 rank, on tensor-parallel ranks and on pipeline stages;
- "serve": the loads of `benchmarks.serve_load` ("batch 1", "throughput") with random weights, for every number of ranks
  (`--stages` pipeline stages each), then "batch 1" with NCCL alone; with `--expert-parallel` experts divided by width, then whole.
On a CPU (`--device cpu --shape small`) the sections but "reduce" run over gloo, for a trial of the script itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("reduce", "same", "serve")
SIZES = tuple(1 << power for power in range(12, 25))
"""Bytes of messages: 4 KiB (one token of 2,048 channels) to 16 MiB (2,048 tokens of 4,096)."""
SMALL = {"hidden_size": 128, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 384}
LLAMA_70B = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672}


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def config_of(shape: str) -> tuple[Any, int]:
    """The config of a named shape."""
    from benchmarks.serve import SHAPES
    from hone.model.shape import Shape

    if shape == "llama3-70b":
        return Shape(**LLAMA_70B, max_seq_len=8192, rope_theta=500000.0, tie_embeddings=False).config(
            128256, None, 0
        ), 128256
    if shape == "small":
        return Shape(**SMALL, max_seq_len=2048).config(2048, None, 0), 2048
    found, vocab_size = SHAPES[shape]
    return found.config(vocab_size, None, 0), vocab_size


def folder_of(shape: str) -> str:
    """A folder with the config.json of a shape, and no weights."""
    import torch

    from hone.model.hf import write_config

    folder = Path(tempfile.mkdtemp(prefix="hone-shape-"))
    write_config(config_of(shape)[0], folder, torch.bfloat16)
    return str(folder)


# ---- sections, each in a process of its own -------------------------------------------------------------------------


def reduce(args: argparse.Namespace) -> None:
    """Started by torchrun: microseconds of an all-reduce of bfloat16, the slowest rank's, median of 5 replays of 50."""
    import torch
    import torch.distributed as dist

    from hone.parallel.one_shot import OneShot

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    one = OneShot(dist.group.WORLD, rank, size, device, max_bytes=4 << 20)

    def nccl(x: torch.Tensor) -> None:
        dist.all_reduce(x)

    for num_bytes in SIZES:
        x = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
        times = {}
        for name, work in (("one_shot", one.all_reduce), ("nccl", nccl)):
            if name == "one_shot" and not one.takes(x):
                continue
            times[name] = round(_replayed_us(work, x), 2)
        if rank == 0:
            say(section="reduce", ranks=size, bytes=num_bytes, **times)
    dist.destroy_process_group()


def _replayed_us(work: Any, x: Any) -> float:
    import torch
    import torch.distributed as dist

    work(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            work(x)
    found = []
    for _ in range(6):
        x.zero_()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / 50)
    slowest = torch.tensor(sorted(found[1:])[2], device=x.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def same(args: argparse.Namespace) -> None:
    """Whether ranks write the greedy tokens of one process (float32, so that the order of sums decides no token)."""
    import torch

    from hone.model import hf
    from hone.model.decoder import build
    from hone.model.shape import Shape
    from hone.serve.engine import Engine, EngineSpec
    from hone.serve.request import SamplingParams

    shape = Shape(hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=8, intermediate_size=1536, max_seq_len=512)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        model = build(shape.config(1000, None, 0))
        for name, one in model.named_parameters():
            if one.dim() == 2:
                one.detach().mul_(8 if "embed" in name else 4)
        hf.save(model, folder, dtype=dtype)
        prompts = [[(5 * place + at) % 1000 for at in range(20 + 30 * place)] for place in range(8)]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=48)
        wanted = None
        for ranks in (1, *args.ranks):
            for field in ("tensor_parallel_size", "pipeline_parallel_size"):
                if ranks == 1 and wanted is not None:
                    continue
                spec = EngineSpec.read({field: ranks, "num_pages": 512, "max_num_seqs": 8})
                engine = Engine(folder, spec, device=args.device)
                found = [one.tokens for one in engine.generate(prompts, params)]
                engine.close()
                wanted = wanted or found
                equal = sum(a == b for one, two in zip(found, wanted) for a, b in zip(one, two))
                say(
                    section="same",
                    ranks=ranks,
                    split=field,
                    dtype=str(dtype),
                    equal=equal,
                    tokens=sum(map(len, wanted)),
                )


def serve(args: argparse.Namespace) -> None:
    """One engine of `args.size` ranks (and `args.stages` stages) under the loads."""
    from benchmarks.serve_load import MAX_NUM_SEQS, MEMORY, measure
    from hone.serve.engine import Engine, EngineSpec
    from hone.serve.request import SamplingParams

    if not args.one_shot:
        os.environ["HONE_ONE_SHOT"] = "0"  # the workers inherit it
    _, vocab_size = config_of(args.shape)
    begun = time.perf_counter()
    fields = {
        "tensor_parallel_size": args.size, "pipeline_parallel_size": args.stages, "load_format": "dummy",
        "max_num_seqs": MAX_NUM_SEQS, "max_model_len": 8192, "enable_expert_parallel": args.expert_parallel,
    }  # fmt: skip
    if args.device == "cuda":
        fields["gpu_memory_utilization"] = MEMORY
    else:
        fields |= {"max_num_seqs": 8, "max_model_len": 2048}
    engine = Engine(folder_of(args.shape), EngineSpec.read(fields), device=args.device)

    def go(prompts: list[list[int]], outputs: list[int]) -> float:
        params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count) for count in outputs]
        start = time.perf_counter()
        done = engine.generate(prompts, params)
        spent = time.perf_counter() - start
        assert [len(one.tokens) for one in done] == outputs, [one.error for one in done if one.error][:1]
        return spent

    go([[5] * 64], [16])
    about = {"ranks": args.size, "stages": args.stages, "one_shot": args.one_shot, "shape": args.shape}
    about |= {"expert_parallel": True} if args.expert_parallel else {}
    say(
        section="serve",
        load="start-up",
        value=round(time.perf_counter() - begun, 1),
        unit="s",
        **about,
        sizes=engine.sizes,
    )
    begun = time.perf_counter()
    while engine.idle():
        pass
    say(section="serve", load="graphs captured while idle", value=time.perf_counter() - begun, unit="s", **about)
    for load in args.loads:
        say(section="serve", load=load, **measure(go, load, vocab_size), **about)
    faulthandler.dump_traceback_later(15, exit=True)  # an end that hangs says where
    engine.close()


# ---- the runs ---------------------------------------------------------------------------------------------------------


def run(words: list[str], seconds: float, torchrun: int = 0) -> None:
    """This script with other words, in a process group that is killed after `seconds`."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
    command = [sys.executable, *launcher, "-m", "benchmarks.serve_ranks", *words]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code: Any = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = f"no end after {seconds:.0f} s"
        os.killpg(process.pid, 9)
        process.wait()
    if code:
        say(section=words[1], failed=str(code), words=words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--shape", default="llama3-8b", help="small, llama3-1b, llama3-8b, llama3-70b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--loads", nargs="+", default=["batch 1", "throughput"])
    parser.add_argument(
        "--expert-parallel", action="store_true", help="of a mixture: once more, with whole experts a rank"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--nccl", dest="one_shot", action="store_false", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        {"reduce": reduce, "same": same, "serve": serve}[args.section](args)
        return
    ranks = [str(one) for one in args.ranks]
    shared = ["--shape", args.shape, "--device", args.device, "--ranks", *ranks]
    if "reduce" in args.only and args.device == "cuda":
        for count in args.ranks:
            run(["--section", "reduce", *shared], args.seconds, torchrun=count)
    if "same" in args.only:
        run(["--section", "same", *shared], args.seconds)
    if "serve" in args.only:
        for count in args.ranks:
            words = ["--section", "serve", *shared, "--size", str(count), "--stages", str(args.stages)]
            run([*words, "--loads", *args.loads], args.seconds)
            if args.expert_parallel and count > 1:
                run([*words, "--loads", *args.loads, "--expert-parallel"], args.seconds)
        run([*words, "--loads", "batch 1", "--nccl"], args.seconds)


if __name__ == "__main__":
    main()
