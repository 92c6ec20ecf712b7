"""A model on simulated devices, with and without a training that knows their noise: `python -m benchmarks.simulated_devices MODEL TEXT`.

MODEL is a folder, TEXT what `hone eval` takes. First the loss of the model as it is, on analog memory 1 s, an hour, a day and a year after
writing, with light of few to many photons, and with spikes of few to many steps, several seeds of the devices each. Then the model is
trained `--steps` steps on `--train` twice, plainly and with the noise of analog memory, and both are scored on it. Numbers are of a
simulation: no row is a claim about time or energy. Rows in ledger/simulated_devices.jsonl: `value` mean loss (nats/token) above that of the
same weights in floats, `half_range` of the seeds, `n` seeds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ledger import append, table
from hone.eval.score import score
from hone.eval.text import read_texts
from hone.model.decoder import Decoder
from hone.model.devices import DEVICES
from hone.model.devices.run import NoisyLinears, simulate
from hone.model.hf import load

AGES = {"1 s": 1.0, "1 h": 3600.0, "1 d": 86400.0, "1 y": 31_536_000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"analog, {name} after writing": ("analog", {"after_s": age}) for name, age in AGES.items()},
    "analog, 1 y, drift not compensated": ("analog", {"after_s": AGES["1 y"], "drift_compensation": False}),
    **{f"optical, {count} photons": ("optical", {"photons": count}) for count in (10, 100, 1000, 10_000)},
    **{f"spiking, {steps} steps": ("spiking", {"steps": steps}) for steps in (8, 16, 32, 64)},
    **{f"spiking, binary, {steps} steps": ("spiking", {"steps": steps, "code": "binary"}) for steps in (4, 8)},
}
SEEDLESS = ("spiking",)


def losses(make: Any, text: Any, kind: str, fields: dict[str, Any], seeds: int) -> tuple[list[float], dict[str, float]]:
    """Mean loss of the model that `make` gives, on the device, for each seed, and the operations of a multiplication."""
    found, each = [], {}
    for seed in range(1 if kind in SEEDLESS else seeds):
        model = make()
        counts = simulate(model, DEVICES[kind](kind=kind, seed=seed, **fields))
        found.append(score(model, text.tokens, text.starts, window=512, batch_tokens=16384).mean_loss)
        each = {name: count / counts["macs"] for name, count in counts.items() if name != "macs"}
    return found, each


def rows_of(make: Any, text: Any, name: str, cases: dict[str, Any], seeds: int) -> list[dict[str, Any]]:
    """A row for each case: what its losses are above that of the weights in floats."""
    plain = score(make(), text.tokens, text.starts, window=512, batch_tokens=16384).mean_loss
    print(f"{name}: {plain:.4f} in floats", flush=True)
    rows = [{"figure": f"{name}: in floats", "value": plain, "unit": "nats/token", "n": 1, "half_range": None}]
    for case, (kind, fields) in cases.items():
        began = time.monotonic()
        found, each = losses(make, text, kind, fields, seeds)
        above = [one - plain for one in found]
        row = {"figure": f"{name}: {case}", "value": float(np.mean(above)), "unit": "nats/token", "n": len(found)}
        row["note"] = "of each multiplication: " + ", ".join(f"{count:.4g} {name}" for name, count in each.items())
        rows.append({**row, "half_range": (max(above) - min(above)) / 2 if len(found) > 1 else None})
        print(f"{row['figure']}: +{row['value']:.4f} ({time.monotonic() - began:.0f} s; {row['note']})", flush=True)
    return rows


def tuned(folder: Path, device: str, tokens: np.ndarray, steps: int, kind: str | None, rate: float) -> Decoder:
    """The model after `steps` steps of AdamW on sequences of 512 of `tokens`, with the noise of `kind`."""
    model = load(folder, device=device, dtype=torch.float32).train()
    noise = None if kind is None else NoisyLinears(model, DEVICES[kind](kind=kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    rows = torch.from_numpy(tokens[: len(tokens) // 513 * 513].astype(np.int64)).view(-1, 513).to(device)
    order = torch.Generator().manual_seed(0)
    for step in range(steps):
        if noise is not None:
            noise.begin(None, step)
        batch = rows[torch.randint(len(rows), (16,), generator=order)]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, (steps - step) / (0.5 * steps))
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if noise is not None:
        for linear in noise.linears:  # evaluations replace dense layers
            linear.__class__ = linear.__class__.__mro__[1]
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("--train", default="", help="text to train on; none: no training")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens scored")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    device, folder = arguments.device, arguments.model
    text = read_texts(arguments.text, folder, max_tokens=arguments.tokens)
    rows = rows_of(
        lambda: load(folder, device=device, dtype=torch.float32).eval(), text, folder.name, CASES, arguments.seeds
    )
    if arguments.train:
        given = read_texts(arguments.train, folder, max_tokens=4_000_000)
        analog = {name: case for name, case in CASES.items() if case[0] == "analog"}
        for kind, name in ((None, "trained on plainly"), ("analog", "trained on with noise")):
            state = tuned(folder, device, given.tokens, arguments.steps, kind, arguments.rate).state_dict()

            def make(state: Any = state) -> Decoder:
                model = load(folder, device=device, dtype=torch.float32).eval()
                model.load_state_dict(state)
                return model

            rows += rows_of(make, text, f"{folder.name}, {arguments.steps} steps {name}", analog, arguments.seeds)
    print(table(rows))
    if not arguments.no_ledger:
        print(append("simulated_devices", rows))


if __name__ == "__main__":
    main()
