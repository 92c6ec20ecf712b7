"""Every form of distillation against plain training at equal tokens, of a student with a sixth of the weights of a trained model.

    python -m benchmarks.truths.forms --model FOLDER --device cuda --workers 12 --out FILE;  ... --from FILE

The arms of `benchmarks.distillations`, with the given model as the teacher: students of the same random weights make `--start-steps`
plain steps, then the same number of steps on the same batches, each in another way. KL(teacher || student) is of held-out text,
KL(student || teacher) of text that the student continues from held-out prompts. Two arms more ask whether a student's own text
lowers the latter: pure reverse KL (no cross entropy) on the data, and on what the student writes in every step.
Protocol: the learning rate is chosen with seed 100 by the loss of plain training (1e-3 and 3e-3 were tried; 1e-3); then seeds 0, 1, 2. What "on-policy lowers reverse
KL" means here: the paired difference of KL(student || teacher), on-policy less reverse KL on the data, has an interval below 0.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.distillations import ARMS as FORMS
from benchmarks.distillations import KEPT as FEW
from benchmarks.distillations import NAMES, ON_POLICY, PLAIN, PROMPT, Live
from benchmarks.truths import common
from hone.base.interval import half_width, paired
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.model.hf import Checkpoint, load
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine

STUDENT = Shape(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, intermediate_size=768, max_seq_len=2048)
KEPT = 64
"""Ids a token of the cached arms, as `hone teach` keeps."""
ON_DATA, ON_OWN = "pure reverse KL on the data", "pure reverse KL on the student's text"
_PURE = {"kind": "distill", "divergence": "reverse_kl", "alpha": 1.0}
ARMS: dict[str, dict[str, Any]] = {
    **{name.replace(f", {FEW} ", f", {KEPT} "): how for name, how in FORMS.items()},
    ON_DATA: _PURE,
    ON_OWN: {**_PURE, "text": {"kind": "student", "prompt_tokens": PROMPT, "share": 1.0}},
}
COSTS = {"the teacher's text": 3, ON_OWN: 2, ON_POLICY: 1}
"""Those that write text take longest and begin first."""
SIZES = {"steps": 100, "start_steps": 200, "rows_a_step": 128, "seq_len": 64, "lr": 1e-3, "score_rows": 1024}
ROWS = 64
"""Sequences that are scored at once."""


def measure(arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Figures of one student."""
    dtype = common.dtype_of(options)[1]
    held_out = common.tokens_of(options, "heldout")
    teacher = load(options.model, options.device, dtype).eval().requires_grad_(False)
    student = begun(seed, options)
    objective = dict(ARMS[arm])
    given: Any = Live(teacher, sampled="drawn" in arm, k=KEPT) if arm.startswith("cached") else teacher
    for name in ("teacher", "text"):
        if isinstance(objective.get(name), dict) and objective[name]["kind"] in ("student", "teacher", "peer"):
            objective[name] = {**objective[name], "seed": 1000 + seed}
    spec = OBJECTIVES.read(objective)
    given = given if spec.from_teacher or spec.from_cache else None
    fit(student, options.steps, options.start_steps, objective, given, seed, options)
    return scores(student.eval(), teacher, held_out, options)


def fit(
    student: Decoder, steps: int, first: int, objective: dict[str, Any], given: Any, seed: int, options: argparse.Namespace
) -> None:  # fmt: skip
    """Trains on the batches of `seed` from number `first` on, the same for all arms."""
    text = common.tokens_of(options, "calibration")
    trainer = Trainer(
        student, steps=steps, schedule=Cosine(warmup=10), optimizer=AdamW(lr=options.lr), precision=common.dtype_of(options)[0],
        objective=OBJECTIVES.read(objective), teacher=given,
    )  # fmt: skip
    for step in range(first, first + steps):
        trainer.step(common.drawn(text, seed, step, options.rows_a_step, options.seq_len))


def begun(seed: int, options: argparse.Namespace) -> Decoder:
    """The student with which every arm of a seed begins, trained by the first process that asks, which others wait for."""
    config = Checkpoint(options.model).config
    student = build(STUDENT.config(config.vocab_size, eos=config.eos_token_ids[0]), device=options.device, seed=seed)
    path = options.scratch / f"begun-{seed}.pt"
    with common.only_one(path):
        if not path.exists():
            fit(student, options.start_steps, 0, {"kind": "next_token"}, None, seed, options)
            torch.save(student.state_dict(), path)
    student.load_state_dict(torch.load(path, map_location=options.device, weights_only=True))
    return student.float()  # as it would be read from a folder


@torch.no_grad()
def scores(student: Decoder, teacher: Decoder, held_out: np.ndarray, options: argparse.Namespace) -> dict[str, float]:
    """Of stretches of the held-out text, and of as many that the student continues."""
    found: dict[str, list[float]] = {"loss": [], "kl": [], "own_kl": []}
    length, device = options.seq_len, options.device
    starts = np.linspace(0, len(held_out) - length - 1, options.score_rows).astype(np.int64)

    def both(tokens: torch.Tensor) -> list[torch.Tensor]:
        return [one(tokens, Causal(tokens)).float().log_softmax(-1) for one in (student, teacher)]

    for first in range(0, len(starts), ROWS):
        batch = common.stretch(held_out, starts[first : first + ROWS], length)
        tokens, targets = (torch.from_numpy(one).to(device) for one in (batch.tokens, batch.targets))
        log_q, log_p = both(tokens)
        found["loss"].append(float(-log_q.gather(-1, targets[..., None]).mean()))
        found["kl"].append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    prompts = common.stretch(held_out, starts, length).tokens[:, :PROMPT]
    own = generate(student, torch.from_numpy(prompts.copy()).to(device), length - PROMPT, temperature=1.0, seed=0)
    for part in own.split(ROWS):
        log_q, log_p = (one[:, PROMPT - 1 : -1] for one in both(part))
        found["own_kl"].append(float((log_q.exp() * (log_q - log_p)).sum(-1).mean()))
    return {name: statistics.fmean(values) for name, values in found.items()}


def rows(found: common.Found, header: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each arm of two or more seeds and each figure, beside plain training on the same seeds; of the student's own text also beside reverse KL on the data."""
    sizes, made = header["sizes"], []
    what = f"{sizes['steps']} steps of {sizes['rows_a_step']} x {sizes['seq_len']} tokens after {sizes['start_steps']} plain ones, lr {sizes['lr']:g}"
    beside = {ON_POLICY: "reverse KL", ON_OWN: ON_DATA}
    for arm in (one for one in ARMS if one in found and common.enough(found, one)):
        for name, said in NAMES.items():
            values = common.values_of(found, arm, name)
            row = {
                "figure": f"{header['model']}: {arm}, {said}", "value": statistics.fmean(values), "unit": "nats/token",
                "n": len(values), "interval": half_width(values), "note": what,
            }  # fmt: skip
            peers = [PLAIN] if arm != PLAIN else []
            peers += [beside[arm]] if name == "own_kl" and arm in beside else []
            peers = [peer for peer in peers if peer in found and common.enough(found, arm, peer)]
            for peer in peers:
                other = common.values_of(found, peer, name, arm)
                apart = paired(other, common.values_of(found, arm, name, peer))
                row |= {"peer": peer, "peer_value": statistics.fmean(other), "difference": apart.by}
                made.append({**row, "difference_interval": apart.half})
            if not peers:
                made.append(row)
    return made


if __name__ == "__main__":
    from benchmarks.truths import forms

    common.main(forms, "distillations")
