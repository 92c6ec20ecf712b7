"""Observers: the range of a linear's inputs, from statistics of calibration, for scales that do not change at run time."""

from __future__ import annotations

from hone.base.table import Table

OBSERVERS = Table(
    "observer",
    {
        "min_max": "hone.compress.observers.min_max:MinMax",
        "moving_average": "hone.compress.observers.moving_average:MovingAverage",
        "percentile": "hone.compress.observers.percentile:Percentile",
        "mse": "hone.compress.observers.mse:MSE",
        "entropy": "hone.compress.observers.entropy:Entropy",
        "cross_entropy": "hone.compress.observers.cross_entropy:CrossEntropy",
    },
)
