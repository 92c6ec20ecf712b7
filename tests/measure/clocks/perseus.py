"""Measured sweeps that others published, as facts: time and energy of work by clock or by power limit."""

from __future__ import annotations

from hone.measure.clocks.fit import Point

A100_FORWARD = [
    Point(mhz, time_s, energy_j)
    for mhz, time_s, energy_j in (
        (1410, 0.0501617, 23.80547), (1365, 0.0504454, 23.49530), (1320, 0.0515781, 22.50446), (1275, 0.0529630, 21.24956),
        (1230, 0.0548155, 19.81770), (1185, 0.0567343, 18.99662), (1140, 0.0588907, 18.35890), (1095, 0.0611722, 17.75708),
        (1080, 0.0620387, 17.51309), (1050, 0.0636757, 17.58452), (1005, 0.0664857, 17.78131), (960, 0.0694502, 17.85533),
        (915, 0.0727032, 17.91111), (870, 0.0765417, 18.05504), (855, 0.0777307, 18.23936),
    )
]  # fmt: skip
"""Forward pass of a stage of a 175B model on an A100 SXM by graphics clock (Perseus, arXiv:2312.06902, its published profile)."""

V100_RESNET50 = {
    100: (6781.17, 98.38), 125: (5064.97, 121.97), 150: (4148.66, 144.59), 175: (3852.18, 166.37), 200: (3700.97, 184.94),
    225: (3584.30, 205.44), 250: (3514.99, 220.25),
}  # fmt: skip
"""Power limit in watts: seconds an epoch and mean watts of ResNet-50 on ImageNet with batches of 256 on a V100 (Zeus, NSDI 2023,
its published traces)."""
