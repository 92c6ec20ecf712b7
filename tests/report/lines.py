"""Writes a realistic line of artifacts without doing any of the work: what the report is tested and looked at with."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from hone.base.artifact import Artifact, Draft, start
from hone.base.durable import write_atomic, write_jsonl
from hone.base.figure import Estimate
from hone.base.run import Run
from hone.base.spec import Spec

MACHINE = {
    "cpu": "AMD EPYC 9B14 (2 of 192 threads)",
    "num_cores": 2,
    "ram_bytes": 8 * 1024**3,
    "gpus": [],
    "os": "Debian GNU/Linux 12",
    "python": "3.11.2",
    "calibration": {
        "read_bytes_per_s": 21.4e9,
        "matmuls": [{"dtype": "float32", "m": 1024, "n": 1024, "k": 1024, "flops_per_s": 9.6e10}],
        "op_s": 4.1e-6,
    },
}
HOSTILE = "</script><script>alert('x')</script> & \"quotes\" <img src=x onerror=alert(1)> ]]> <!-- "
BASE_BYTES = 7_602_176
PROMPTS = ["def read_file(path):\n    ", "The module provides", "class Error(Exception):\n    "]


class Anything(Spec):
    """A spec that takes any field."""

    model_config = ConfigDict(frozen=True, extra="allow")


class LineMaker:
    """Makes artifacts of one line in `folder`; `energy` gives the imagined machine a sensor."""

    def __init__(self, folder: Path, *, energy: bool = False, hostile: bool = False) -> None:
        self.folder = folder
        self.energy = energy
        self.hostile = HOSTILE if hostile else ""
        self.made: dict[str, Artifact] = {}
        self.random = random.Random(7)

    def begin(self, kind: str, name: str, spec: dict[str, Any], **parents: str) -> Draft:
        draft = start(
            self.folder / f"{kind}-{name}",
            kind=kind,
            spec=Anything(**spec),
            parents={role: self.made[parent] for role, parent in parents.items()},
            run=Run(quiet=True, machine=MACHINE),
        )
        assert isinstance(draft, Draft), f"{kind}-{name} is already there"
        inputs = " ".join(f"--{role} {self.folder.name}/{parent}" for role, parent in parents.items())
        draft.command(f"hone {kind} {inputs} --out work/{self.folder.name}/{kind}-{name}{self.hostile}")
        return draft

    def finish(self, draft: Draft, *, time_s: float, memory: float, tokens: int = 0, bound: bool = False) -> None:
        off = 1 + self.random.uniform(-0.24, 0.24)
        draft.predict(
            {
                "time_s": Estimate(
                    value=time_s * (0.31 if bound else off), unit="s", formula="flops / matmul rate", bound=bound
                ),
                "peak_memory_bytes": Estimate(
                    value=memory * (1 + self.random.uniform(-0.15, 0.12)),
                    unit="B",
                    formula="memory at start + weights + activations + optimizer",
                    tolerance=0.2,
                ),
            }
        )
        draft.record("time_s", time_s, "s")
        draft.record("peak_memory_bytes", memory, "B")
        draft.record("memory_growth_bytes", memory * 0.4, "B")
        absent = "" if self.energy else "no energy sensor (NVML, RAPL) on this machine"
        joules = 14.0 * time_s if self.energy else None
        draft.record("energy_j", joules, "J", note=absent)
        if tokens:
            draft.record("joules_per_token", joules and joules / tokens, "J/token", note=absent)
        name = draft.target.name
        self.made[name] = draft.commit()

    def data(self, name: str = "corpus") -> None:
        draft = self.begin("data", name, {"source": "python", "vocab_size": 4096, "seed": 0})
        steps, documents, num_bytes = [], 6412, 41_300_000
        for step, slot, losses in [
            ("read", "reader", {"not text": (212, 1_900_000), "empty": (98, 0)}),
            ("language", "filter", {"language is not en": (143, 820_000)}),
            (
                "rules",
                "filter",
                {"too few words": (1204, 310_000), "repeated lines": (187, 1_460_000), "mostly symbols": (77, 912_000)},
            ),
            ("exact", "dedup", {"exact copy": (88, 1_210_000)}),
            ("near", "dedup", {"near copy (Jaccard >= 0.8)": (402, 4_030_000)}),
            ("tests", "filter", {}),
        ]:
            after = documents - sum(row[0] for row in losses.values())
            bytes_after = num_bytes - sum(row[1] for row in losses.values())
            steps.append(
                {
                    "name": step,
                    "slot": slot,
                    "documents_in": documents,
                    "bytes_in": num_bytes,
                    "documents_out": after,
                    "bytes_out": bytes_after,
                    "reasons": {reason: {"documents": row[0], "bytes": row[1]} for reason, row in losses.items()},
                }
            )
            if step == "rules":
                sizes = {"too few words": (320_000, 300_000), "repeated lines": (1_500_000, 0), "no braces": (0, 0)}
                steps[-1]["rules"] = [
                    {
                        "reason": reason,
                        "keep": "words >= 50" + self.hostile,
                        "alone": {"documents": 3, "bytes": alone},
                        "marginal": {"documents": 1, "bytes": only},
                    }
                    for reason, (alone, only) in sizes.items()
                ]
            if step == "tests":
                steps[-1]["figures"] = {
                    "evaluations": {
                        "gsm8k" + self.hostile: {"examples": 1319, "too_short": 19, "hit": 13, "documents": 7}
                    },
                    "documents": {"looked_through": 4001, "hit": 7},
                }
            documents, num_bytes = after, bytes_after
        write_jsonl(
            draft.folder / "contamination.jsonl",
            [
                {
                    "step": "tests",
                    "evaluation": "gsm8k",
                    "row": row,
                    "documents": 13 - row,
                    "text": f"Natalia sold clips to {48 + row} of her friends" + self.hostile,
                    "samples": [{"id": "a1", "source": "lib/sale.py", "text": "sold clips to" + self.hostile}],
                }
                for row in range(13)
            ],
        )
        write_json(
            draft.folder / "stats.json",
            {
                "steps": steps,
                "scorers": [
                    {"name": "lexicon", "column": "toxic_words", "entries": 412.0},
                    {
                        "name": "cascade",
                        "column": "quality",
                        "cheap_auc": 0.934,
                        "cheap_accuracy": 0.871,
                        "cheap_held_out": 240,
                        "dear_share": 0.187,
                    },
                ],
                "groups": {
                    "group": {
                        "python": {
                            "documents": 4000,
                            "dropped": {"rules: too few words": 40},
                            "scores": {"quality": 0.71},
                        },
                        "docstrings" + self.hostile: {
                            "documents": 2100,
                            "dropped": {"rules: too few words": 1164, "near: near copy": 30},
                            "scores": {"quality": 0.32},
                        },
                    },
                },
                "packing": {"256": {"stream": {"rows": 28_985, "waste": 0.00028, "parted": 459}}},
                "languages": {
                    "en": {"documents": documents, "bytes": num_bytes},
                    "de": {"documents": 91, "bytes": 400_000},
                    "fr": {"documents": 52, "bytes": 420_000},
                },
                "sources": {
                    "docstrings": {"documents": 2900, "bytes": 9_100_000},
                    "python": {"documents": 1101, "bytes": 21_558_000},
                },
            },
        )
        write_jsonl(
            draft.folder / "dropped.jsonl",
            [
                {"step": step["name"], "reason": reason, "source": f"lib/{reason[:4].strip()}_{n}.py", "text": text}
                for step in steps
                for reason in step["reasons"]
                for n, text in enumerate(
                    ["x = 1\n\n\n# " + "=" * 60 + "\n" + reason + self.hostile, "import this\n" * 12]
                )
            ],
        )
        write_jsonl(
            draft.folder / "sample.jsonl",
            [{"source": "lib/textwrap.py", "text": '"""Text wrapping and filling.\n"""\n\nimport re\n' + self.hostile}],
        )
        for figure, value, unit in [
            ("input_bytes", 41_300_000, "B"),
            ("input_documents", 6412, "documents"),
            ("kept_documents", documents, "documents"),
            ("kept_bytes", num_bytes, "B"),
            ("train_tokens", 7_420_112, "tokens"),
            ("val_tokens", 151_904, "tokens"),
            ("bytes_per_token", 4.05, "B/token"),
        ]:
            draft.record(figure, value, unit)
        self.finish(draft, time_s=31.2, memory=612e6)

    def train(self, name: str, *, floor: float, params: int, time_s: float, **parents: str) -> None:
        objective = {"kind": "distill", "alpha": 0.5, "temperature": 2.0} if "teacher" in parents else {"kind": "lm"}
        draft = self.begin(
            "train", name, {"steps": 400, "batch_size": 16, "seq_len": 256, "objective": objective}, **parents
        )
        if "teacher" in parents:
            draft.did({"slot": "objective", **objective})
        rows: list[dict[str, Any]] = []
        for step in range(400):
            loss = (
                floor + (8.3 - floor) * math.exp(-step / 38) + 0.55 * math.exp(-step / 190) + self.random.gauss(0, 0.07)
            )
            rate = 3e-3 * min(1, (step + 1) / 40) * 0.5 * (1 + math.cos(math.pi * step / 400))
            rows.append(
                {
                    "step": step,
                    "loss": loss,
                    "lr": rate,
                    "grad_norm": 1.2 + self.random.random(),
                    "tokens": 4096 * (step + 1),
                }
            )
            if (step + 1) % 50 == 0:
                val = floor + (8.3 - floor) * math.exp(-step / 38) + 0.55 * math.exp(-step / 190) + 0.11
                rows.append({"step": step, "val_loss": val, "val_bits_per_byte": val / math.log(2) / 4.05})
        write_jsonl(draft.folder / "steps.jsonl", rows)
        write_jsonl(
            draft.log / "timing.jsonl",
            [
                {"step": step, "tokens_per_s": 21_000.0, "mfu": 0.41, "memory_bytes": 7e8, "time_s": 0.19}
                for step in range(0, 400, 10)
            ],
        )
        tokens = 400 * 4096
        draft.predict(
            {
                "tokens_per_s": Estimate(
                    value=tokens / time_s * 1.13, unit="tokens/s", formula="6 N flops a token / matmul rate"
                ),
                "model_bytes": Estimate(value=params * 4, unit="B", formula="4 bytes a parameter"),
            }
        )
        for figure, value, unit in [
            ("num_params", params, "parameters"),
            ("model_bytes", params * 4 + 8192, "B"),
            ("train_tokens", tokens, "tokens"),
            ("final_loss", rows[-2]["loss"], "nats/token"),
            ("val_loss", rows[-1]["val_loss"], "nats/token"),
            ("val_bits_per_byte", rows[-1]["val_bits_per_byte"], "bits/byte"),
            ("tokens_per_s", tokens / time_s, "tokens/s"),
            ("mfu", 0.413, "fraction"),
        ]:
            draft.record(figure, value, unit)
        self.finish(draft, time_s=time_s, memory=1.11e9, tokens=tokens)

    def compress(self, name: str, *, num_bytes: int, technique: dict[str, Any], error: float, model: str) -> None:
        calibrated = technique["kind"] == "gptq"
        inputs = {"model": model} | ({"data": "data-corpus"} if calibrated else {})
        draft = self.begin("compress", name, {"steps": [technique]}, **inputs)
        draft.did(technique)
        write_jsonl(
            draft.folder / "layers.jsonl",
            [
                {
                    "name": f"model.layers.{layer}.{part}",
                    "kind": technique["kind"],
                    "bits": technique.get("bits"),
                    "error": error * self.random.uniform(0.6, 1.5) if calibrated else None,
                    "weight_error": error * self.random.uniform(0.8, 1.7),
                }
                for layer in range(4)
                for part in ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj")
            ],
        )
        bits = technique.get("bits")
        draft.predict(
            {
                "model_bytes": Estimate(
                    value=num_bytes * 1.004, unit="B", formula="bits a weight x weights + scales", tolerance=0.02
                )
            }
        )
        for figure, value, unit in [
            ("model_bytes", num_bytes, "B"),
            ("bits_per_weight", bits and bits + 0.125, "bits"),
            ("compression_ratio", BASE_BYTES / num_bytes, "x"),
            ("sparsity", 0.5 if technique["slot"] == "pruner" else 0.0, "fraction"),
            ("relative_output_error", error if calibrated else None, "fraction"),
        ]:
            draft.record(figure, value, unit, note="no calibration inputs were seen" if value is None else "")
        self.finish(draft, time_s=6.0 + 20 * error, memory=690e6)

    def eval(self, name: str, *, model: str, perplexity: float, num_bytes: int, kl: float | None) -> None:
        parents = {"model": model, "data": "data-corpus"} | ({"reference": "train-base"} if kl is not None else {})
        draft = self.begin("eval", name, {"window": 256, "stride": 128}, **parents)
        loss = math.log(perplexity)
        for figure, value, unit in [
            ("perplexity", perplexity, ""),
            ("loss", loss, "nats/token"),
            ("bits_per_byte", loss / math.log(2) / 4.05, "bits/byte"),
            ("kl_to_reference", kl, "nats/token"),
            ("top1_agreement", (kl is not None and 1 - math.sqrt(kl) / 2) or None, "fraction"),
            ("model_bytes", num_bytes, "B"),
            ("tokens_evaluated", 151_904, "tokens"),
        ]:
            if value is not None:
                draft.record(figure, value, unit, note="window 256, stride 128" if figure == "perplexity" else "")
        self.finish(draft, time_s=4.4, memory=520e6)

    def serve(
        self,
        name: str,
        *,
        model: str,
        rate: float,
        engine: dict[str, Any],
        draft_model: str | None = None,
        turn: int = 0,
    ) -> None:
        parents = {"model": model, "data": "data-corpus"} | ({"draft": draft_model} if draft_model else {})
        spec = {
            "engine": {
                "batching": "continuous",
                "enable_prefix_caching": True,
                "block_size": 16,
                "drafter": None,
                **engine,
            },
            "num_requests": 32,
        }
        draft = self.begin("serve", name, spec, **parents)
        tails = [
            "with open(path) as file:\n        return file.read()",
            "with open(path, 'rb') as stream:\n        return stream",
        ]
        write_jsonl(
            draft.folder / "samples.jsonl",
            [
                {"prompt": prompt, "text": f"{tails[turn % 2]}\n\n# a way to say the same thing {n}{self.hostile}"}
                for n, prompt in enumerate(PROMPTS)
            ],
        )
        write_jsonl(draft.log / "requests.jsonl", [{"id": n, "ttft_s": 0.02 * n, "tokens": 64} for n in range(32)])
        draft.predict(
            {"tokens_per_s": Estimate(value=rate * 1.19, unit="tokens/s", formula="rows / decode step seconds")}
        )
        for figure, value, unit in [
            ("tokens_per_s", rate, "tokens/s"),
            ("requests_per_s", rate / 64, "requests/s"),
            ("ttft_p50_s", 38 / rate, "s"),
            ("ttft_p99_s", 171 / rate, "s"),
            ("tpot_p50_s", 9 / rate, "s"),
            ("prefix_hit_rate", 0.0 if engine.get("enable_prefix_caching") is False else 0.42, "fraction"),
            ("acceptance_rate", 0.71 if draft_model else None, "fraction"),
            ("model_bytes", BASE_BYTES, "B"),
            ("kv_cache_bytes", 16_777_216, "B"),
        ]:
            draft.record(figure, value, unit, note="no draft model" if value is None else "")
        self.finish(draft, time_s=2048 / rate, memory=560e6, tokens=2048)


def write_json(path: Path, values: Any) -> None:
    import json

    write_atomic(path, json.dumps(values, indent=1).encode())


def write_line(folder: Path, *, energy: bool = False, hostile: bool = False) -> Path:
    """A whole line as recipes/tiny.yaml makes it, figures invented but plausible. Returns `folder`."""
    line = LineMaker(folder, energy=energy, hostile=hostile)
    line.data()
    line.train("base", floor=3.02, params=1_900_544, time_s=78.3, data="data-corpus")
    line.train("draft", floor=3.41, params=1_050_112, time_s=51.0, data="data-corpus", teacher="train-base")
    for name, num_bytes, technique, error in [
        ("int8", 2_150_000, {"slot": "quantizer", "kind": "rtn", "bits": 8, "group_size": 128}, 0.004),
        ("int4", 1_310_000, {"slot": "quantizer", "kind": "gptq", "bits": 4, "group_size": 32}, 0.041),
        ("int4-rtn", 1_310_000, {"slot": "quantizer", "kind": "rtn", "bits": 4, "group_size": 32}, 0.078),
        ("pruned", BASE_BYTES, {"slot": "pruner", "kind": "magnitude", "sparsity": 0.5}, 0.19),
    ]:
        line.compress(name, num_bytes=num_bytes, technique=technique, error=error, model="train-base")
    for name, model, perplexity, num_bytes, kl in [
        ("base", "train-base", 22.91, BASE_BYTES, None),
        ("int8", "compress-int8", 22.92, 2_150_000, 0.0003),
        ("int4", "compress-int4", 23.12, 1_310_000, 0.0093),
        ("int4-rtn", "compress-int4-rtn", 23.71, 1_310_000, 0.034),
        ("pruned", "compress-pruned", 31.4, BASE_BYTES, 0.33),
        ("draft", "train-draft", 34.2, 4_208_640, 0.41),
    ]:
        line.eval(name, model=model, perplexity=perplexity, num_bytes=num_bytes, kl=kl)
    line.serve("plain", model="train-base", rate=1480, engine={})
    line.serve("int4", model="compress-int4", rate=1210, engine={}, turn=1)
    line.serve(
        "speculative",
        model="train-base",
        rate=1905,
        engine={"drafter": {"kind": "model", "num_tokens": 4}},
        draft_model="train-draft",
    )
    line.serve("static", model="train-base", rate=610, engine={"batching": "static"})
    line.serve("no-prefix", model="train-base", rate=1302, engine={"enable_prefix_caching": False})
    return folder
