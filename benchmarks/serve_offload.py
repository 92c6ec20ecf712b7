"""Layers in pinned host memory: `python -m benchmarks.serve_offload` on a GPU, predicted beside measured, in a minute.

Llama-3-8B's shape (`--shape` names another of `benchmarks.serve`) with random bf16 weights and an `engine.gpu_memory` that holds
`--share` of the layers' bytes (0.5), buffers included. Sections, each printed as it ends and skipped beyond `--seconds`: the link from
pinned memory (calibrated), milliseconds per token of 1, 64 and 512 sequences, prefill tokens/s, and that tokens are those of a model
that is all on the device. Rows go to benchmarks/ledger/serve_offload.jsonl with `--ledger`. `--device cpu --shape tiny` tries the script.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import append, table
from benchmarks.serve import SHAPES
from hone.base.figure import human_bytes
from hone.cost.serve.offload import fewest_streamed
from hone.cost.serve.schedule import StepKind
from hone.cost.serve.serving import Serving
from hone.measure.calibrate import calibrate
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from hone.model.families.config_json import to_hf
from hone.model.shards import write_json
from hone.serve.engine import Engine, EngineSpec
from hone.serve.offload import budget
from hone.serve.planning import budget_on, pages_bytes, serving_of
from hone.serve.request import Request, SamplingParams
from hone.serve.sizing import DeviceMemory, work_bytes

PROMPT, WARM, STEPS, BLOCK = 64, 4, 12, 64
"""Tokens of a decoding sequence's prompt, steps before and in each measurement, and tokens of a page."""


class Bench:
    """One engine with streamed layers, and the estimates of its steps."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args, self.device = folder, args, torch.device(args.device)
        self.rows: list[dict[str, Any]] = []
        gpu = self.device.type == "cuda"
        self.batches = (1, 64, 512) if gpu else (1, 4, 16)
        self.chunk = 8192 if gpu else 256
        machine, facts = describe(args.device), CheckpointFacts.of(folder)
        spec = EngineSpec(
            load_format="dummy",
            max_num_seqs=max(self.batches),
            max_num_batched_tokens=self.chunk,
            max_model_len=self.chunk,
            enable_prefix_caching=False,
            block_size=BLOCK,
            num_pages=(max(self.batches) * (PROMPT + 64) + self.chunk) // BLOCK,
        )
        ends, layers = budget.layer_sizes(facts, facts.dtype)
        found = fewest_streamed(layers, args.share * sum(layers))
        assert found is not None, "the share holds two buffers"
        assert spec.num_pages is not None
        cache = (spec.num_pages + 1) * pages_bytes(spec, [facts])
        work = work_bytes(facts.config.dims(), spec, facts.dtype, args.device)
        total = int(ends + found.device_bytes + cache + work) + (1 << 20)
        self.spec = spec.model_copy(update={"gpu_memory": str(total)})
        self.resident = spec
        one = pages_bytes(spec, [facts])
        divided = budget_on(self.spec, facts, machine, one, DeviceMemory.now(self.device))
        assert divided is not None
        self.serving: Serving = serving_of(self.spec, facts, machine, divided.offload)
        began = time.perf_counter()
        self.engine = Engine(folder, self.spec, device=self.device)
        self.wait()
        print(
            f"opened in {time.perf_counter() - began:.1f} s with gpu_memory={human_bytes(total)}\n{self.engine.sizes}",
            flush=True,
        )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, figure: str, value: float, predicted: float, unit: str) -> None:
        """Keeps and prints a measured figure beside the predicted one."""
        self.rows.append(
            {"figure": figure, "value": value, "unit": unit, "n": 1, "predicted": predicted, "ratio": value / predicted}
        )
        print(
            f"{figure}: predicted {predicted:,.2f}, measured {value:,.2f} {unit} ({value / predicted:.2f})", flush=True
        )

    def requests(self, count: int, length: int, outputs: int) -> None:
        generator = torch.Generator().manual_seed(count)
        params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
        vocab = self.engine.model.config.vocab_size
        for name in range(count):
            self.engine.add(
                Request(f"{count}-{name}", torch.randint(3, vocab, (length,), generator=generator).tolist(), params)
            )

    def finish(self) -> None:
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error

    def decode(self, count: int) -> None:
        """Milliseconds of a step in which `count` sequences have one new token each."""
        self.requests(count, PROMPT, WARM + STEPS + 8)
        engine = self.engine
        while engine.stats()["waiting"] or any(seq.num_computed < seq.num_prompt for seq in engine.scheduler.running):
            engine.step()
        for _ in range(WARM):
            engine.step()
        self.wait()
        spent = []
        for _ in range(STEPS):
            began = time.perf_counter()
            engine.step()  # returns when the step before is done: as long as one step in the steady state
            spent.append(time.perf_counter() - began)
        self.finish()
        step = self.serving.step_seconds(StepKind(count, PROMPT + WARM + STEPS, (), count, 1)).value
        self.note(f"decode, {count} sequences", 1e3 * statistics.median(spent), 1e3 * step, "ms/token")

    def prefill(self) -> None:
        """Tokens/s of prompts that fill the steps."""
        length = self.chunk // 4
        self.requests(4, length, 1)
        self.finish()
        self.wait()
        began = time.perf_counter()
        self.requests(8, length, 1)
        self.finish()
        self.wait()
        rate = 8 * length / (time.perf_counter() - began)
        step = self.serving.step_seconds(StepKind(0, 0, ((0, length),) * 4, 4, 1)).value
        self.note(f"prefill, {length} tokens each", rate, 4 * length / step, "tokens/s")

    def copies(self) -> None:
        """The link: a step's copies alone."""
        rate = self.serving.offload.copy_seconds(self.serving.machine) if self.serving.offload else None
        print(
            f"copies alone: predicted {rate.value * 1e3:.1f} ms ({rate.formula})" if rate else "nothing streams",
            flush=True,
        )

    def tokens(self) -> None:
        """Greedy tokens of a few prompts, streamed and all on the device, kernel by kernel in both."""
        prompts = [[3 + (7 * place + name) % 500 for place in range(5 + 9 * name)] for name in range(6)]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        streamed = [one.tokens for one in self.engine.generate(prompts, params)]
        del self.engine
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        resident = Engine(self.folder, self.resident, device=self.device)
        resident.runner.graphs = None
        found = [one.tokens for one in resident.generate(prompts, params)]
        print(
            f"tokens of the streamed and the resident model are {'EQUAL' if found == streamed else 'NOT EQUAL'}",
            flush=True,
        )
        assert found == streamed, f"{streamed} and {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama3-8b", choices=sorted(SHAPES))
    parser.add_argument("--share", type=float, default=0.5, help="part of the layers' bytes that stays on the device")
    parser.add_argument("--seconds", type=float, default=55, help="sections that would begin later are skipped")
    parser.add_argument(
        "--ledger", action="store_true", help="append the rows to benchmarks/ledger/serve_offload.jsonl"
    )
    args = parser.parse_args()
    began = time.perf_counter()
    dtype = "bfloat16" if args.device.startswith("cuda") else "float32"
    if args.device == "cpu":
        budget.DEVICES.append("cpu")
    calibrate(args.device, dtype)
    describe.cache_clear()
    calibration = describe(args.device).calibration
    link = calibration.pinned_bytes_per_s if calibration is not None else None
    print(
        f"link: {f'{link / 1e9:.1f} GB/s' if link else 'not measured'}; {time.perf_counter() - began:.1f} s", flush=True
    )
    shape, vocab = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as work:
        write_json(Path(work) / "config.json", to_hf(shape.config(vocab)) | {"torch_dtype": dtype})
        bench = Bench(Path(work), args)
        sections: list[tuple[str, Callable[[], None]]] = [("copies", bench.copies), ("prefill", bench.prefill)]
        sections += [(f"decode {count}", lambda count=count: bench.decode(count)) for count in bench.batches]
        sections.append(("tokens", bench.tokens))
        failed = False
        for name, section in sections:
            if time.perf_counter() - began > args.seconds:
                print(f"{name}: skipped, {args.seconds:.0f} s are over", flush=True)
                continue
            try:
                section()
            except Exception:
                failed = True
                traceback.print_exc()
            print(f"  ({name} done at {time.perf_counter() - began:.1f} s)", flush=True)
        print(table(bench.rows))
        if args.ledger and bench.rows:
            append(
                "serve_offload",
                [
                    {**row, "figure": f"{args.shape}, {args.share:.0%} of layers' bytes: {row['figure']}"}
                    for row in bench.rows
                ],
                args.device,
            )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
