"""Simulated devices: hardware of the future that multiplies a linear's input by its weight. One file per device."""

from hone.base.table import Table

DEVICES = Table(
    "simulated device",
    {
        "analog": "hone.model.devices.analog:Analog",
        "optical": "hone.model.devices.optical:Optical",
        "spiking": "hone.model.devices.spiking:Spiking",
    },
)
