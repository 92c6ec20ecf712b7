"""The engine against transformers' generate, same weights and prompts in one run, ABAB: `python -m benchmarks.serve`.

On a CPU: one stream, and 16 requests at once, against `generate` one by one and as one padded batch. On a GPU
(`--device cuda --shape llama3-8b`): start-up, decode at batch 1, 16 and 64 with and without CUDA graphs (of what reading
weights and keys once would allow), prefill, 512 requests of 100..1024 tokens in and out, and memory against its forecast,
each section within `--seconds` and printed as it ends. `--only decode peer` takes a minute; it needs neither network nor
files. Rows go to benchmarks/ledger/serve.jsonl. `--peer vllm`: benchmarks.serve_peer, hone and vLLM in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import append, table
from hone.cost.memory import serve_bytes
from hone.measure.window import Window
from hone.model import hf
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.shape import Shape
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import Request, SamplingParams

SHAPES = {
    "tiny": (Shape(hidden_size=160, num_layers=5, num_heads=5, num_kv_heads=5, intermediate_size=432), 2048),
    "llama3-8b": (
        Shape(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            intermediate_size=14336,
            max_seq_len=8192,
            rope_theta=500000.0,
            tie_embeddings=False,
        ),
        128256,
    ),
    "llama3-1b": (
        Shape(
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            intermediate_size=8192,
            max_seq_len=8192,
            rope_theta=500000.0,
        ),
        128256,
    ),
    "qwen3-0.6b": (
        Shape(
            family="qwen3",
            hidden_size=1024,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_seq_len=8192,
            rope_theta=1000000.0,
        ),
        151936,
    ),
    "qwen3-30b-a3b": (
        Shape(
            family="qwen3_moe",
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=6144,
            max_seq_len=8192,
            rope_theta=1000000.0,
            tie_embeddings=False,
            feed_forward={  # type: ignore[arg-type]
                "kind": "moe",
                "num_experts": 128,
                "intermediate_size": 768,
                "router": {"kind": "softmax", "top_k": 8},
            },
        ),
        151936,
    ),
    "gpt-oss-20b": (
        Shape(
            family="gpt_oss",
            hidden_size=2880,
            num_layers=24,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            intermediate_size=2880,
            max_seq_len=8192,
            rope_theta=150000.0,
            tie_embeddings=False,
            window=128,
            mixers=("sliding_window", "attention"),
            feed_forward={  # type: ignore[arg-type]
                "kind": "moe",
                "num_experts": 32,
                "intermediate_size": 2880,
                "biases": True,
                "swiglu_limit": 7.0,
                "router": {"kind": "softmax", "top_k": 4},
            },
        ),
        201088,
    ),
}


def random_model(config: ModelConfig, device: str, dtype: torch.dtype) -> Decoder:
    """Random weights drawn on the device (`build` draws on the CPU, minutes for billions)."""
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model


def prompts_of(count: int, least: int, most: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def exactly(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# ---- CPU: hone beside transformers ---------------------------------------------------------------------------------


class Peer:
    """transformers' generate over the same folder."""

    def __init__(self, folder: str, device: str, dtype: torch.dtype) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._device = device

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts as one left-padded batch."""
        widest = max(map(len, prompts))
        ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self._model.generate(
            ids,
            attention_mask=mask.to(self._device),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[:, widest:].tolist()


def compare(config: ModelConfig, folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Single stream and 16 at once, hone and the peer in turn, `rounds` times; medians."""
    tokens, prompts = 64, prompts_of(16, 12, 48, config.vocab_size)
    engine = Engine(folder, EngineSpec(enable_prefix_caching=False))
    peer = Peer(folder, "cpu", torch.float32)
    same = sum(
        engine.generate([prompt], exactly(tokens))[0].tokens == peer.generate([prompt], tokens)[0]
        for prompt in prompts[:4]
    )
    print(f"greedy tokens identical to {peer.name} on {same} of 4 prompts")
    rates: dict[str, list[float]] = {}
    runs = {
        "single stream": (4, lambda: [engine.generate([prompt], exactly(tokens)) for prompt in prompts[:4]]),
        "peer single stream": (4, lambda: [peer.generate([prompt], tokens) for prompt in prompts[:4]]),
        "16 at once": (16, lambda: engine.generate(prompts, exactly(tokens))),
        "peer one by one": (8, lambda: [peer.generate([prompt], tokens) for prompt in prompts[:8]]),
        "peer one batch": (16, lambda: peer.generate(prompts, tokens)),
    }
    for _ in range(args.rounds):
        for name, (count, work) in runs.items():
            rates.setdefault(name, []).append(count * tokens / timed(work))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rows = []
    for figure, mine, theirs in (
        ("decode tokens/s, 1 stream", "single stream", "peer single stream"),
        ("decode tokens/s, 16 requests, peer one by one", "16 at once", "peer one by one"),
        ("decode tokens/s, 16 requests, peer one batch", "16 at once", "peer one batch"),
    ):
        rows.append(
            {
                "figure": figure,
                "value": medians[mine],
                "unit": "tokens/s",
                "n": args.rounds,
                "half_range": (max(rates[mine]) - min(rates[mine])) / 2,
                "peer": peer.name,
                "peer_value": medians[theirs],
                "ratio": medians[mine] / medians[theirs],
            }
        )
    return rows


# ---- one accelerator: sections, each within its time ------------------------------------------------------------------


class Bench:
    """The sections of a GPU run share one engine."""

    def __init__(self, config: ModelConfig, args: argparse.Namespace) -> None:
        self.config, self.args = config, args
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        self.rows: list[dict[str, Any]] = []
        self.engine: Engine

    def add(self, figure: str, value: float | None, unit: str, **more: Any) -> None:
        row = {"figure": f"{self.args.shape}: {figure}", "value": value, "unit": unit, **more}
        self.rows.append(row)
        shown = "-" if value is None else f"{value:,.4g}"
        extra = " ".join(
            f"{name}={found:.4g}" if isinstance(found, float) else f"{name}={found}" for name, found in more.items()
        )
        print(f"  {row['figure']}: {shown} {unit} {extra}", flush=True)

    def run(self) -> list[dict[str, Any]]:
        """All sections; one that fails is reported and the next ones go on."""
        wanted = self.args.only or ("decode", "prefill", "throughput", "peer")
        for section in (self.start_up, *(getattr(self, name) for name in wanted)):
            print(f"{section.__name__}:", flush=True)
            try:
                section()
            except Exception:
                traceback.print_exc()
                if section == self.start_up:
                    break
        return self.rows

    def start_up(self) -> None:
        """Weights (random, on the device) and cache; memory against its forecast at the end of `throughput`."""
        args = self.args
        self.window = Window(args.device)
        self.window.__enter__()
        model_s = timed(lambda: setattr(self, "model", random_model(self.config, args.device, self.dtype)))
        spec = EngineSpec(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_memory_bytes=args.cache_bytes,
        )
        begun = time.perf_counter()
        self.engine = Engine(self.model, spec, device=args.device)
        self.engine.generate([[1] * 8], exactly(2))
        self.add("start-up to first token", time.perf_counter() - begun, "s", n=1, note="weights excluded")
        self.add("random weights", model_s, "s", n=1)
        self.add("KV cache", self.engine.cache_bytes / 2**30, "GiB", n=1)

    def decode(self) -> None:
        """Tokens/s of 1, 16, 64 streams at a context of `--context`; the limit reads every weight and key once a step."""
        read = self._read_rate()
        runner = self.engine.runner
        for batch in self.args.batches:
            for graphs in (True, False) if runner.graphs is not None else (False,):
                kept, runner.graphs = runner.graphs, runner.graphs if graphs else None
                try:
                    step_s, steps, length = self._steps(batch)
                finally:
                    runner.graphs = kept
                of_limit = self._step_bytes(batch, length) / read / step_s if read else None
                name = f"decode, batch {batch}" + ("" if graphs else ", no graphs")
                self.add(name, batch / step_s, "tokens/s", n=steps, ms=1e3 * step_s, of_limit=of_limit)

    def _steps(self, batch: int) -> tuple[float, int, float]:
        """(median seconds per step, steps, mean length) of `batch` sequences that all decode."""
        engine, args = self.engine, self.args
        engine.pool.clear()
        names = [f"d{place}" for place in range(batch)]
        for name, prompt in zip(names, prompts_of(batch, args.context, args.context, self.config.vocab_size, 1)):
            engine.add(Request(name, prompt, exactly(args.tokens + 64)))
        seqs = [engine._seqs[name] for name in names]
        while not all(seq.num_output > 3 for seq in seqs):  # prompts are in, kernels compiled, graphs captured
            engine.step()
        spent: list[float] = []
        begun, first = time.perf_counter(), seqs[0].num_computed
        while len(spent) < args.tokens and time.perf_counter() - begun < args.seconds:
            spent.append(timed(engine.step))
        length = (first + seqs[0].num_computed) / 2
        self._abort_all(names)
        return statistics.median(spent), len(spent), length

    def _step_bytes(self, batch: int, length: float) -> float:
        """Bytes that a decode step must read: all weights but the embedding's unused rows, and the sequences' keys and values."""
        config, engine = self.config, self.engine
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        if not config.tie_embeddings:
            weights -= (config.vocab_size - batch) * config.hidden_size * self.dtype.itemsize
        token = engine.cache_bytes / (engine.runner.cache.num_pages + 1) / engine.runner.cache.block_size
        return weights + batch * length * token

    def _read_rate(self) -> float:
        """Bytes/s, measured on a GPU unless the command line says."""
        if not self.args.read_tb_per_s and self.args.device != "cpu":
            from benchmarks.kernels.timing import ceilings

            rate = ceilings().read
            self.add("ceiling read", rate / 1e12, "TB/s", n=1)
            torch.cuda.empty_cache()
            return rate
        return self.args.read_tb_per_s * 1e12

    def prefill(self) -> None:
        """Prompt tokens/s of up to 64 prompts of 2,048, one output token each."""
        length = min(2048, self.engine.max_model_len - 2)
        prompts = prompts_of(64, length, length, self.config.vocab_size, 2)
        spent, stats = self._drive(prompts, [1] * len(prompts))
        self.add("prefill", stats["prompt_tokens"] / spent, "tokens/s", n=int(stats["finished"]))

    def throughput(self) -> None:
        """Output tokens/s of `requests` requests, in and out uniform 100..1024, all at once; then the memory peak."""
        args = self.args
        most = min(1024, self.engine.max_model_len // 2 - 1)
        prompts = prompts_of(args.requests, 100, most, self.config.vocab_size, 3)
        lengths = torch.randint(100, most + 1, (args.requests,), generator=torch.Generator().manual_seed(4)).tolist()
        spent, stats = self._drive(prompts, lengths)
        note = f"{int(stats['finished'])} of {args.requests} requests finished in {spent:.0f} s"
        self.add("throughput", stats["output_tokens"] / spent, "tokens/s", n=args.requests, note=note)
        self.add("preemptions", stats["preemptions"], "", n=args.requests)
        self.window.__exit__(None, None, None)
        dims = self.config.dims()
        predicted = serve_bytes(
            dims,
            weights_bytes=self.config.num_params * self.dtype.itemsize,
            kv_bytes=self.engine.cache_bytes,
            max_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            context_tokens=args.max_num_seqs * 2048,
            dtype="float32" if self.dtype is torch.float32 else "bfloat16",
            device=args.device,
        )
        measured = self.window.memory_growth_bytes
        more = {"peer": "forecast", "peer_value": predicted.value / 2**30, "ratio": measured / predicted.value}
        self.add("memory growth at its peak", measured / 2**30, "GiB", n=1, **more)

    def _drive(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, dict[str, float]]:
        """All requests at once, at most `seconds`; unfinished ones are then aborted, and their tokens count."""
        engine, before = self.engine, self.engine.stats()
        engine.pool.clear()
        names = [f"r{place}" for place in range(len(prompts))]
        for name, prompt, length in zip(names, prompts, lengths):
            engine.add(Request(name, prompt, exactly(length)))
        begun, finished = time.perf_counter(), 0
        while engine.has_work and time.perf_counter() - begun < self.args.seconds:
            for output in engine.step():
                finished += output.finish == "length"
                if output.finish == "error":
                    print(f"  {output.request_id} failed: {output.error}", flush=True)
        spent = time.perf_counter() - begun
        after = engine.stats()
        self._abort_all(names)
        return spent, {name: after[name] - before[name] for name in after} | {"finished": finished}

    def _abort_all(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()

    def peer(self) -> None:
        """transformers' generate on a random model of the same shape, at the batches of `decode`."""
        model = self._peer_model()
        options = {"do_sample": False, "pad_token_id": 0}
        for batch in self.args.batches:
            prompts = prompts_of(batch, self.args.context, self.args.context, self.config.vocab_size, 1)
            ids = torch.tensor(prompts, device=self.args.device)
            more = {"attention_mask": torch.ones_like(ids), **options}

            def generate(tokens: int, ids=ids, more=more) -> None:
                model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **more).tolist()

            self._add_peer(batch, generate)

    def _add_peer(self, batch: int, run: Callable[[int], Any]) -> None:
        """The peer's rate from the difference between many tokens and one."""
        import transformers

        count, spent = min(32, self.args.tokens), []
        run(2)
        for _ in range(2):
            least = timed(lambda: run(1))
            spent.append(timed(lambda: run(count + 1)) - least)
        rate, half_range = batch * count / min(spent), batch * count * (1 / min(spent) - 1 / max(spent)) / 2
        name = f"transformers {transformers.__version__} generate"
        self.add(f"{name}, batch {batch}", rate, "tokens/s", n=2 * count, half_range=half_range)
        for row in self.rows:
            if row["figure"].removesuffix(", no graphs").endswith(f": decode, batch {batch}"):
                row |= {"peer": name, "peer_value": rate, "ratio": row["value"] / rate}

    def _peer_model(self) -> Any:
        """A transformers model with random weights drawn on the device."""
        import transformers

        with tempfile.TemporaryDirectory() as folder:
            hf.write_config(self.config, Path(folder), self.dtype)
            config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        model = model.to_empty(device=self.args.device)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
        with torch.device(self.args.device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no parameter
        return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3, help="CPU: repetitions of every measurement")
    parser.add_argument("--seconds", type=float, default=90.0, help="GPU: most seconds of a section")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--cache-bytes", type=int, default=60 * 2**30, help="GPU: bytes of the KV cache")
    parser.add_argument("--read-tb-per-s", type=float, default=0.0, help="GPU: measured read bandwidth, for the limit")
    parser.add_argument("--sections", action="store_true", help="run the GPU's sections on a CPU")
    parser.add_argument("--only", nargs="*", choices=("decode", "prefill", "throughput", "peer"), help="GPU: sections")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64], help="sequences that decode at once")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of sequences that decode")
    parser.add_argument("--tokens", type=int, default=64, help="most decode steps of a batch")
    parser.add_argument("--no-ledger", action="store_true")
    args = parser.parse_args()
    shape, vocab_size = SHAPES[args.shape]
    config = shape.config(vocab_size, None, 0)
    if args.device == "cpu" and not args.sections:
        with tempfile.TemporaryDirectory() as folder:
            hf.save(random_model(config, "cpu", torch.float32), folder)
            rows = compare(config, folder, args)
    else:
        rows = Bench(config, args).run()
    print(table(rows))
    if not args.no_ledger:
        print(append("serve", rows, args.device))


if __name__ == "__main__":
    if any(word.partition("=")[0] == "--peer" for word in sys.argv[1:]):
        from benchmarks.serve_peer import main as beside

        beside()
    else:
        main()
