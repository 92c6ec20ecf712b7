"""Every form of distillation against plain training at equal tokens: loss, distance to the teacher, and of the student's own text.

    python -m benchmarks.distillations BOOK.txt.gz ... [--steps 120] [--seeds 3]

Bytes of the text are the tokens; the last book is for validation only. One teacher learns the text; students of a sixth of its weights
then make the same number of steps on the same batches, each in another way, from the same students after some plain steps. KL(teacher || student) is of validation text, KL(student ||
teacher) of text that the student itself continues from validation prompts. Runs that are done are kept in `--kept`, from which an
interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.train_lossy import SEQ_LEN, VOCAB, bytes_of
from hone.base.interval import half_width, paired
from hone.feed.load import Batch
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.model.hf import load, save
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.train import OBJECTIVES
from hone.train.cached_logits.facts import LogitsFacts
from hone.train.cached_logits.keep import drawn, most_likely
from hone.train.cached_logits.shards import Cached
from hone.train.loop import Trainer
from hone.train.optimizers.muon import Muon
from hone.train.schedules.cosine import Cosine

TEACHER = Shape(hidden_size=96, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=256, max_seq_len=SEQ_LEN)
STUDENT = Shape(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, max_seq_len=SEQ_LEN)
SEQUENCES, PROMPT, LR = 8, 16, 1e-2
KEPT = 8
"""Ids a token of the cached arms."""
PLAIN = "plain training"
ON_POLICY = "reverse KL on the student's text"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"kind": "next_token"},
    "forward KL": {"kind": "distill"},
    "reverse KL": {"kind": "distill", "divergence": "reverse_kl"},
    "skew KL": {"kind": "distill", "divergence": "skew_kl"},
    ON_POLICY: {
        "kind": "distill",
        "divergence": "reverse_kl",
        "text": {"kind": "student", "prompt_tokens": PROMPT},
    },
    "the teacher's text": {"kind": "distill", "alpha": 1.0, "text": {"kind": "teacher"}},
    "cached, 8 most likely ids and the rest": {"kind": "distill", "teacher": {"kind": "cached"}},
    "cached, 8 most likely ids alone": {"kind": "distill", "teacher": {"kind": "cached", "rest": "zero"}},
    "cached, 8 drawn ids": {"kind": "distill", "teacher": {"kind": "cached"}},
    "its moving average": {"kind": "distill", "alpha": 0.5, "teacher": {"kind": "moving_average", "decay": 0.99}},
    "a peer": {"kind": "distill", "alpha": 0.5, "teacher": {"kind": "peer", "seed": 1000}},
    "hidden states": {"kind": "hidden_states"},
    "relations": {"kind": "relations"},
    "MiniLM": {"kind": "minilm"},
    "attention maps": {"kind": "attention_maps"},
}


class Live:
    """Cached logits of any sequence, computed when they are asked for: batches here begin anywhere in the text."""

    def __init__(self, teacher: Decoder, *, sampled: bool, k: int = KEPT) -> None:
        self._teacher, self._sampled = teacher, sampled
        self._draw = torch.Generator(teacher.device).manual_seed(0)
        numbers = {
            "seq_len": SEQ_LEN,
            "num_sequences": 0,
            "vocab_size": teacher.config.vocab_size,
            "tokenizer": None,
            "data": "",
        }
        self.facts = LogitsFacts(where="memory", k=k, sampled=sampled, temperature=1.0, **numbers)

    @torch.no_grad()
    def of(self, batch: Batch) -> Cached:
        logits = self._teacher(torch.from_numpy(batch.tokens).to(self._teacher.device)).flatten(0, 1)
        found = (
            drawn(logits, self.facts.k, 1.0, self._draw) if self._sampled else most_likely(logits, self.facts.k, 1.0)
        )
        ids, *log_probs = (one.view(*batch.tokens.shape, *one.shape[1:]).cpu() for one in found)
        first, *tails = (one.half().float().numpy() for one in log_probs)  # float16 as on disk
        return Cached(ids.numpy(), first, tails[0] if tails else None)


class Comparison:
    """The runs, with what is kept of them by name."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        books = [np.frombuffer(gzip.open(path).read(), np.uint8) for path in arguments.text]
        self.train, self.val = np.concatenate(books[:-1]), books[-1]
        self.done: dict[str, Any] = json.loads(arguments.kept.read_text()) if arguments.kept.exists() else {}
        folder = arguments.kept.with_suffix(".teacher")
        if not folder.exists():
            model = build(TEACHER.config(VOCAB), seed=100)
            self.fit(model, arguments.teacher_steps, 100, {"kind": "next_token"}, None)
            save(model, folder)
        self.teacher = load(folder).eval().requires_grad_(False)
        print("the teacher", self.scores(self.teacher), flush=True)

    def begun(self, seed: int) -> Decoder:
        """The student with which every arm of a seed begins: after some steps of plain training, so that it writes text at all."""
        folder = self.arguments.kept.with_suffix(f".{seed}")
        if not folder.exists():
            model = build(STUDENT.config(VOCAB), seed=seed)
            self.fit(model, self.arguments.start_steps, seed, {"kind": "next_token"}, None)
            save(model, folder)
        return load(folder)

    def fit(
        self, model: Decoder, steps: int, seed: int, objective: dict[str, Any], teacher: Any, first: int = 0
    ) -> None:
        """Trains on the batches of `seed` from number `first` on, the same for all arms."""
        how = {"optimizer": Muon(kind="muon", lr=LR), "objective": OBJECTIVES.read(objective), "teacher": teacher}
        trainer = Trainer(model, steps=steps, schedule=Cosine(warmup=10), **how)
        for step in range(first, first + steps):
            draw = np.random.default_rng((seed, step))
            trainer.step(bytes_of(self.train, draw.integers(0, len(self.train) - SEQ_LEN - 1, SEQUENCES)))

    def run(self, arm: str, seed: int) -> dict[str, float]:
        """Validation loss and both distances of one student."""
        key = f"{arm} {seed} {self.arguments.start_steps} {self.arguments.steps}"
        if key not in self.done:
            student, objective = self.begun(seed), dict(ARMS[arm])
            given: Any = self.teacher
            if arm.startswith("cached"):
                given = Live(self.teacher, sampled="drawn" in arm)
            for name in ("teacher", "text"):
                if isinstance(objective.get(name), dict) and objective[name]["kind"] in ("student", "teacher", "peer"):
                    objective[name] = {**objective[name], "seed": 1000 + seed}
            self.fit(student, self.arguments.steps, seed, objective, given, first=self.arguments.start_steps)
            self.done[key] = self.scores(student.eval())
            self.arguments.kept.write_text(json.dumps(self.done))
            print(key, self.done[key], flush=True)
        return self.done[key]

    @torch.no_grad()
    def scores(self, student: Decoder) -> dict[str, float]:
        """Of 32 stretches of validation text, and of as many that the student continues."""
        found: dict[str, list[float]] = {"loss": [], "kl": [], "own_kl": []}
        for part in np.split(np.linspace(0, len(self.val) - SEQ_LEN - 1, 32).astype(np.int64), 1):
            batch = bytes_of(self.val, part)
            tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
            log_q, log_p = (one(tokens, Causal(tokens)).log_softmax(-1) for one in (student, self.teacher))
            found["loss"].append(float(-log_q.gather(-1, targets[..., None]).mean()))
            found["kl"].append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
            own = generate(student, tokens[:, :PROMPT], SEQ_LEN - PROMPT, temperature=1.0, seed=int(part[0]))
            log_q, log_p = (
                one(own, Causal(own))[:, PROMPT - 1 : -1].log_softmax(-1) for one in (student, self.teacher)
            )
            found["own_kl"].append(float((log_q.exp() * (log_q - log_p)).sum(-1).mean()))
        return {name: statistics.fmean(values) for name, values in found.items()}


NAMES = {
    "loss": "validation loss",
    "kl": "KL(teacher || student) of validation text",
    "own_kl": "KL(student || teacher) of the student's text",
}


def rows_of(comparison: Comparison, seeds: range) -> list[dict[str, Any]]:
    """A row for each arm and figure, beside plain training (of the student's text also beside reverse KL on the data)."""
    found = {arm: [comparison.run(arm, seed) for seed in seeds] for arm in comparison.arguments.arms}
    rows = []
    for arm, runs in found.items():
        for name, said in NAMES.items():
            values = [one[name] for one in runs]
            peers = [PLAIN] if arm != PLAIN else []
            peers += ["reverse KL"] if arm == ON_POLICY and name == "own_kl" else []
            row = {"figure": f"{arm}, {said}", "value": statistics.fmean(values), "unit": "nats/byte", "n": len(values)}
            row |= {
                "interval": half_width(values),
                "note": f"{comparison.arguments.steps} steps of {SEQUENCES} x {SEQ_LEN} bytes after {comparison.arguments.start_steps} plain ones",
            }
            if not peers:
                rows.append(row)
            for peer in peers:
                other = [one[name] for one in found[peer]]
                apart = paired(other, values)
                more = {"peer": peer, "peer_value": statistics.fmean(other), "difference": apart.by}
                rows.append({**row, **more, "difference_interval": apart.half})
    return rows


def main() -> None:
    """Trains every arm of every seed, prints the rows, adds them to the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+", help="books, the last one for validation")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--start-steps", type=int, default=60, help="plain steps that every student makes first")
    parser.add_argument("--teacher-steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, default=Path("distillations.json"), help="where done runs are kept")
    parser.add_argument(
        "--arms", nargs="*", default=[*ARMS], help="some of the forms; plain training and reverse KL come first"
    )
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    arguments.arms = list(dict.fromkeys((PLAIN, "reverse KL", *arguments.arms)))
    torch.set_num_threads(1)
    rows = rows_of(Comparison(arguments), range(arguments.seeds))
    for row in rows:
        apart = (
            f"  {row['difference']:+.4f} ± {row['difference_interval']:.4f} against {row['peer']}"
            if "peer" in row
            else ""
        )
        print(f"{row['figure']:<90} {row['value']:.4f} ± {row['interval']:.4f}{apart}", flush=True)
    if not arguments.no_ledger:
        ledger.append("distillations", rows)


if __name__ == "__main__":
    main()
