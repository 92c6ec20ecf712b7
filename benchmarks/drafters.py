"""Draft heads: trained beside a model, then tokens a verification and ms/token at batch 1 with and without them, ABAB.

    python -m benchmarks.drafters --model MODEL --data DATA --heldout DOCS.jsonl.gz              # a CPU: --minutes of training a kind
    python -m benchmarks.drafters --model MODEL --data DATA --heldout DOCS.jsonl.gz --device cuda --minutes 1
    python -m benchmarks.drafters --shape llama3-8b --device cuda                                 # costs of steps alone, random weights

DATA is an artifact of `hone data TEXT --tokenizer.path=MODEL`; without --data it is made of --text. Every kind (medusa, eagle3) is trained for
`--minutes` at most and `--steps` at most; prompts are the first tokens of held-out documents, `--prompts` of them, one at a time. Greedy text
must be token-identical with and without heads, else the run fails. Beside the measured speed-up stands the one that the cost room predicts
from the acceptance and the measured times of a plain and a verifying step. With --shape nothing is trained and no acceptance is claimed:
the row is the tokens a verification at which guessing pays. Reads no setting of the device and changes none.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import append, table
from benchmarks.train import SHAPES
from hone.base.artifact import Artifact
from hone.base.figure import Estimate
from hone.base.run import Run
from hone.cost.serve.speculation import break_even, expected_speedup, guess_seconds
from hone.measure.machine import describe
from hone.model.decoder import Decoder, build
from hone.model.facts import CheckpointFacts
from hone.serve.engine import Engine, EngineSpec
from hone.serve.planning import serving_of
from hone.serve.request import Completion, SamplingParams
from hone.train import OBJECTIVES
from hone.train.stage import Train

Row = dict[str, Any]
GUESSES = 3
"""Guesses a step, the drafters' default."""
OPTIONS: dict[str, Row] = {
    "medusa": {"kind": "medusa", "num_heads": 3},
    "eagle3": {"kind": "eagle3", "ttt_length": 4},
}


def made_data(args: argparse.Namespace, work: Path) -> Path:
    """The data artifact: the one given, or one made of --text with the model's tokenizer."""
    if args.data is not None:
        return Path(args.data)
    from hone.data.stage import Data

    text = own_text(args, work / "own.jsonl") if args.own else args.text
    spec = Data.read({"source": str(text), "tokenizer": {"path": str(args.model)}})
    return spec.make(work / "data", {}, Run(quiet=True)).folder


def own_text(args: argparse.Namespace, path: Path) -> Path:
    """--text, and `--own` texts that the model writes: each begins as a window of --text does; half are greedy, half at temperature 0.8."""
    from hone.model.tokenizer import load_tokenizer

    tokenizer, begun = load_tokenizer(args.model), time.perf_counter()
    documents = [tokenizer.encode(text) for text in texts_of(args.text)]
    windows = [
        ids[at : at + args.prompt_tokens]
        for ids in documents
        for at in range(0, len(ids) - args.prompt_tokens, args.own_tokens)
    ]
    prompts = windows[:: max(1, len(windows) // args.own)][: args.own]
    sizes = {"max_num_seqs": 512 if args.device != "cpu" else 8, "max_model_len": args.prompt_tokens + args.own_tokens}
    pages = sizes["max_num_seqs"] * (sizes["max_model_len"] // 16 + 1)
    engine = Engine(args.model, EngineSpec.read({**sizes, "num_pages": pages}), device=args.device)
    params = [
        SamplingParams(max_tokens=args.own_tokens, temperature=0.8 * (number % 2), ignore_eos=True, seed=number)
        for number in range(len(prompts))
    ]
    done = engine.generate(prompts, params)
    with open(path, "w", encoding="utf8") as file:
        for ids in documents + [prompt + one.tokens for prompt, one in zip(prompts, done, strict=True)]:
            file.write(json.dumps({"text": tokenizer.decode(ids)}) + "\n")
    count = sum(len(one.tokens) for one in done)
    print(f"wrote {count} tokens of {len(prompts)} texts in {time.perf_counter() - begun:.1f} s", flush=True)
    return path


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a .jsonl, perhaps compressed."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf8") as file:
        for line in file:
            yield json.loads(line)["text"]


def trained(args: argparse.Namespace, kind: str, data: Path, work: Path) -> tuple[Artifact, Row]:
    """Heads of a kind, trained on `data` beside the model."""
    spec = {
        "objective": {**OPTIONS[kind], **json.loads(args.options).get(kind, {})},
        "steps": args.steps,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "optimizer": {"kind": "adamw", "lr": args.lr, "weight_decay": 0.0},
        "precision": "bf16" if args.device.startswith("cuda") else "fp32",
        "validation": {"sequences": 1},
        "early_stopping": {"max_time_s": 60 * args.minutes, "interval": 10},
    }
    parents = {"data": Artifact.read(data), "model": Artifact.read(args.model)}
    made = Train.read(spec).make(work / kind, parents, Run(quiet=True, device=args.device))
    figures = made.figures
    estimate = figures["memory_growth_bytes"].estimate
    told = {
        "steps": figures["num_steps"].value,
        "tokens": figures["train_tokens"].value,
        "seconds": figures["time_s"].value,
        "params": figures["num_params"].value,
        "memory_growth_bytes": figures["memory_growth_bytes"].value,
        "memory_growth_predicted": estimate and estimate.value,
    }
    return made, told


def prompts_of(args: argparse.Namespace, model: Path) -> list[list[int]]:
    """The first tokens of held-out documents."""
    from hone.model.tokenizer import load_tokenizer

    tokenizer, found = load_tokenizer(model), []
    for text in texts_of(args.heldout):
        ids = tokenizer.encode(text[: 20 * args.prompt_tokens])[: args.prompt_tokens]
        if len(ids) == args.prompt_tokens:
            found.append(ids)
        if len(found) == args.prompts:
            break
    return found


class Stream:
    """One engine at batch 1: its text, its seconds a token and a decode step, and its counters."""

    def __init__(self, args: argparse.Namespace, model: Path | Decoder, draft: Any = None, **spec: Any) -> None:
        longest = args.prompt_tokens + args.tokens + 128  # rounds write behind the last token
        sizes = {"max_num_seqs": 1, "num_pages": 64, "max_model_len": longest, **spec}
        self.engine = Engine(model, EngineSpec.read(sizes), draft=draft, device=args.device)
        self.args, self.seconds, self.tokens = args, 0.0, 0

    def go(self, prompts: list[list[int]], temperature: float = 0.0) -> list[Completion]:
        """Continues the prompts, one at a time; the first token's time counts in."""
        params = SamplingParams(max_tokens=self.args.tokens, temperature=temperature, ignore_eos=True, seed=0)
        begun = time.perf_counter()
        done = [self.engine.generate([prompt], params)[0] for prompt in prompts]
        self.seconds += time.perf_counter() - begun
        self.tokens += sum(len(one.tokens) for one in done)
        return done

    @property
    def per_token_s(self) -> float:
        return self.seconds / self.tokens


def counted(engine: Engine, before: dict[str, float]) -> tuple[float, float, int]:
    """Tokens a verification, share of guesses accepted, and verifications since `before`."""
    after = engine.stats()
    steps, kept, drafted = (
        after[name] - before.get(name, 0) for name in ("verified_sequences", "accepted_tokens", "draft_tokens")
    )
    return 1 + kept / max(steps, 1), kept / max(drafted, 1), int(steps)


def measured(
    args: argparse.Namespace, kind: str, heads: Path, told: Row, guesses: int, tree_size: int | None
) -> Iterator[Row]:
    """Rows of one kind: acceptance greedy and sampled, ms/token beside plain decoding, the predicted speed-up."""
    prompts = prompts_of(args, args.model)
    drafter = {"kind": kind, "num_tokens": guesses, "tree_size": tree_size}
    plain, fast = Stream(args, args.model), Stream(args, args.model, heads, drafter=drafter)
    if guesses != GUESSES:
        kind = f"{kind}, {guesses} guess{'es' if guesses > 1 else ''}"
    rounds = fast.engine.runner.rounds
    if rounds is not None and not rounds.tree.is_chain:
        kind = f"{kind}, a tree of {len(rounds.tree) - 1}"
    for one in (plain, fast):  # kernels, graphs
        one.go(prompts[:2])
        one.go(prompts[:2])
        one.seconds, one.tokens = 0.0, 0
    before = fast.engine.stats()
    for _ in range(args.rounds):
        same = [one.tokens == other.tokens for one, other in zip(plain.go(prompts), fast.go(prompts), strict=True)]
        if not all(same) and not args.device.startswith("cuda"):  # on a GPU a product of another size rounds otherwise
            raise SystemExit(f"{kind}: greedy text of {same.count(False)} prompts differs from plain decoding")
    each, rate, steps = counted(fast.engine, before)
    what = f"{args.model_name}, batch 1, {len(prompts)} held-out prompts of {args.prompt_tokens}, {args.tokens} tokens"
    common = {
        "n": steps,
        "technique": f"drafter/{drafter['kind']}",
        "num_tokens": guesses,
        "note": what,
        "trained": told,
        "same_text": same.count(True),
    }
    yield {"figure": f"{kind}: tokens a verification, greedy", "value": each, "unit": "tokens", **common}
    yield {"figure": f"{kind}: guesses accepted, greedy", "value": rate, "unit": "fraction", **common}
    predicted = predicted_speedup(args, told["params"], drafter, each, fast.engine.spec)
    yield {
        "figure": f"{kind}: ms a token",
        "value": 1e3 * fast.per_token_s,
        "unit": "ms",
        "peer": "hone, no drafter",
        "peer_value": 1e3 * plain.per_token_s,
        "ratio": plain.per_token_s / fast.per_token_s,
        "step_ms": 1e3 * fast.per_token_s * each,
        "predicted_ratio": predicted.value,
        "predicted_how": ("bound: " if predicted.bound else "") + predicted.formula,
        **common,
    }
    before = fast.engine.stats()
    fast.go(prompts, temperature=1.0)
    each, _, steps = counted(fast.engine, before)
    sampled = {**common, "n": steps}
    yield {"figure": f"{kind}: tokens a verification, temperature 1", "value": each, "unit": "tokens", **sampled}


def predicted_speedup(args: argparse.Namespace, params: int, drafter: Row, each: float, spec: EngineSpec) -> Estimate:
    """The speed-up that the cost room expects of the acceptance, from this machine's calibration if there is one."""
    machine, facts = describe(args.device), CheckpointFacts.of(args.model)
    serving = serving_of(spec.model_copy(update={"drafter": None, "draft": None}), facts, machine)
    count = drafter["num_tokens"]
    guess = guess_seconds(machine, params, 1 if drafter["kind"] == "medusa" else count, serving.dtype)
    return expected_speedup(serving, args.prompt_tokens + args.tokens / 2, count, each, guess)


def costs(args: argparse.Namespace, kind: str, work: Path) -> Iterator[Row]:
    """The seconds of a plain step and of one that guesses and verifies, on random weights, whose text says nothing."""
    import numpy as np

    sizes, vocab = SHAPES[args.shape]
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = build(sizes.config(vocab), device=args.device, dtype=dtype).eval().requires_grad_(False)
    objective, folder = OBJECTIVES.read(OPTIONS[kind]), work / kind
    heads = objective.begin(model, np.zeros(vocab, dtype=np.int64), 0)
    objective.save(heads, model.config, folder, args.shape, dtype)
    del heads
    prompt = [list(range(1, args.prompt_tokens + 1))]
    times = {}
    for name, draft in (("plain", None), ("heads", folder), ("plain", None)):
        run = Stream(args, model, draft)
        run.go(prompt * 3)  # kernels, and graphs, which are captured when a size comes again
        run.seconds, run.tokens = 0.0, 0
        before = run.engine.stats()
        run.go(prompt * args.rounds)
        after = run.engine.stats()
        passes = after["steps"] - before["steps"]
        if draft is not None and (verified := after["verified_sequences"] - before["verified_sequences"]):
            passes = verified + 2 * args.rounds  # a prompt's step and the first round of each verify nothing
        times.setdefault(name, []).append(run.seconds / passes)
        del run
    plain, step = (min(times[name]) for name in ("plain", "heads"))
    yield {
        "figure": f"{kind}: tokens a verification at which guessing pays, {args.shape}",
        "value": step / plain,
        "unit": "tokens",
        "n": args.rounds * args.tokens,
        "break_even_rate": break_even(GUESSES, step, 0.0, plain),
        "plain_ms": 1e3 * plain,
        "step_ms": 1e3 * step,
        "note": "a step that guesses and verifies over a plain one, batch 1, random weights, the prompt's step included",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES])
    parser.add_argument("--kinds", default="medusa,eagle3")
    parser.add_argument("--guesses", default=str(GUESSES), help="numbers of guesses a step, one after another")
    parser.add_argument("--trees", default="", help="guesses of trees to verify on a GPU, beside the chain")
    parser.add_argument("--own", type=int, default=0, help="texts that the model writes, to train on beside --text")
    parser.add_argument("--own-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    for name, value in (("steps", 2000), ("batch-size", 8), ("seq-len", 128), ("prompts", 8), ("prompt-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--options", default="{}", help='fields of the objectives, as JSON: {"eagle3": {"ttt_length": 2}}'
    )
    parser.add_argument("--ledger", action="store_true", help="add the rows to benchmarks/ledger/drafters.jsonl")
    args = parser.parse_args()
    args.model_name = args.shape or args.model.name
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = None if args.shape else made_data(args, work)
        for kind in args.kinds.split(","):
            made, told = (None, {}) if args.shape else trained(args, kind, data, work)
            for number in [GUESSES] if made is None else map(int, args.guesses.split(",")):
                for size in [None] if made is None else [number, *map(int, filter(None, args.trees.split(",")))]:
                    found = (
                        costs(args, kind, work)
                        if made is None
                        else measured(args, kind, made.folder, told, number, size)
                    )
                    for row in found:
                        rows.append(row)
                        print(json.dumps(row), flush=True)
    print(table(rows))
    if out := os.environ.get("OUT"):
        Path(out, "drafters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.ledger:
        append("drafters", rows, args.device)


if __name__ == "__main__":
    main()
