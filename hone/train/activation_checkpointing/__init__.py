"""Activation checkpointing: what of the layers' activations is kept for the backward pass, recomputed in it, or waits on the host."""

from hone.cost.activations.segments import Segment as Segment
from hone.train.activation_checkpointing.base import ActivationCheckpointing as ActivationCheckpointing
from hone.train.activation_checkpointing.uniform import EveryNth as EveryNth
from hone.train.activation_checkpointing.uniform import KeepAll as KeepAll
from hone.train.activation_checkpointing.uniform import SquareRoot as SquareRoot
