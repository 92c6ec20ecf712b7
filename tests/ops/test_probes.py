"""The work that a calibration times of a training's kernels: each runs, and its amount is what the operation moves or computes."""

from __future__ import annotations

import torch

from hone.measure import training
from hone.measure.training import FP8, KERNEL
from hone.ops import probes
from hone.ops.fp8.recipes import RECIPES


def test_each_probe_runs_and_counts_its_own_work(monkeypatch):
    small = {
        "_TOKENS": 32,
        "_NORM_TOKENS": 32,
        "_GATE_TOKENS": 32,
        "_HIDDEN": 64,
        "_INNER": 128,
        "_HEADS": 4,
        "_HEAD_DIM": 16,
        "_WEIGHTS": 1024,
        "_LINEARS": [(32, 64, 48)],
    }
    for name, value in small.items():
        monkeypatch.setattr(probes, name, value)
    half = torch.bfloat16
    found = probes._passes("cpu", half) | probes._updates("cpu", half) | probes._fp8_linears("cpu")
    results = {}
    for name, probe in found.items():
        with torch.set_grad_enabled(probe.wants_grad):
            results[name] = probe.work()
    assert [one.shape for one in results[KERNEL, "rms_norm"]] == [(32, 64), (32, 64), (64,)]
    assert results[KERNEL, "swiglu"][0].shape == (32, 256)
    assert found[KERNEL, "rms_norm"].amount == 2 * 8 * 32 * 64 and found[KERNEL, "swiglu"].amount == 2 * 8 * 32 * 128
    assert found[KERNEL, "rope"].amount == 2 * 4 * 32 * 4 * 16
    assert found[KERNEL, "adamw"].amount == 30 * 1024 and found[KERNEL, "widen"].amount == 6 * 1024
    full = probes._updates("cpu", torch.float32)
    full[KERNEL, "adamw"].work()
    assert full[KERNEL, "adamw"].amount == 28 * 1024
    for recipe in RECIPES:
        for held in (False, True):
            forward, trained = (found[FP8, recipe, held, passes, 32, 64, 48] for passes in ("forward", "trained"))
            assert 3 * forward.amount == trained.amount == 6 * 32 * 64 * 48
            grads = results[FP8, recipe, held, "trained", 32, 64, 48]
            assert [one.shape for one in grads] == [(32, 48), (64, 48)]
    rates = training.linear_rates(lambda name: found[name].amount, list(found))
    assert len(rates) == 2 * 2 * len(RECIPES)
