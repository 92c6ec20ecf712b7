"""Cholesky factors that a calibration times: what they are of, and how their rates are kept."""

from __future__ import annotations

import pytest
import torch

from hone.measure.calibration import FactorRate
from hone.measure.factors import FACTOR, definite, factor_probes, factor_rates
from hone.measure.timer import Timer
from tests.cost.h200 import h200


@pytest.mark.parametrize("size", [1, 64, 512])
def test_what_is_factored_is_positive_definite(size: int) -> None:
    torch.manual_seed(0)
    factor, failed = torch.linalg.cholesky_ex(definite("cpu", size))
    assert not bool(failed) and bool((factor.diagonal() > 0).all())


def test_each_size_gets_its_rate() -> None:
    probes = factor_probes("cpu", (32, 64))
    ticks = iter(range(100))
    timer = Timer("cpu", clock=lambda: float(next(ticks)))
    took = {name: timer.typical(probe, 1.0) for name, probe in probes.items()}
    found = factor_rates(lambda name: probes[name].amount / took[name], [("op",), *probes])
    assert [(one.columns, one.flops_per_s) for one in found] == [(32, 32**3 / 3), (64, 64**3 / 3)]
    assert list(probes) == [(FACTOR, 32), (FACTOR, 64)]


def test_rates_of_factors_are_shown_and_joined() -> None:
    known = h200().calibration.model_copy(update={"factors": (FactorRate(columns=4096, flops_per_s=12e12),)})
    assert ("Cholesky factor of 4,096 columns", "12,000.0 GFLOP/s") in known.table()
    assert h200().calibration.joined(known).factors == known.factors
