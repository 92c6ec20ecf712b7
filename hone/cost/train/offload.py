"""What leaves the device costs: seconds of a step, bytes of the device, the host and the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hone.base.figure import Estimate, human_bytes
from hone.cost.dims import ModelDims
from hone.cost.memory import BUCKET, BYTES
from hone.cost.train.rates import BUFFERS, WINDOW, Rates, host_rates
from hone.cost.train.update import UpdateCost, layer_matrix_params
from hone.measure.machine import Machine

COPIES, COPIES_OF_MANY, MANY = 4, 18, 8
"""Bytes a weight that an update on the host moves beside the optimizer's own. Of few threads: its gradient is read and its rounded
weight written; what is widened and scaled stays in the cores' caches. (One thread moved 28 bytes a weight at 11.6 GB/s, a copy's
rate.) The chunks of `MANY` threads stay in no cache: the scaled gradient is written and read, too, and the new weight read again.
(16 threads took 2.96 s for 8.03e9 weights at a copy's 123 GB/s, and 1.43 s for 4.10e9: 45 and 43 bytes a weight.)"""

SCALED_BYTES = 8
"""Of `COPIES_OF_MANY` those of the scaled gradient, which are not there for float32 gradients that a GPU scales before they come."""

UPDATE_S, MOVED, DISK = "offload_update_s", "offload_moved_bytes", "offload_disk_bytes"
"""Figures of a step: seconds of the update on the host, bytes between it and the device, bytes read and written on its disk."""

SHARE_OF_FORWARD, SHARE_OF_BACKWARD = 1 / 3, 2 / 3
"""Of the seconds of a step's passes."""


@dataclass(frozen=True)
class Left:
    """What of a training's state left the device."""

    gradients_leave: bool = False
    """Whether gradients are summed on the host."""
    streams: bool = False
    """Whether layers' parameters come for their passes."""
    streams_files: bool = False
    """Whether they come from files."""
    delayed_update: bool = False
    """Whether an update is computed beside the next step's passes."""
    to_files: bool = False
    """Whether optimizer state and masters are in files."""
    memory_bytes: float = 0.0
    """Bytes of them that stay in the host's memory."""


class Offload(Protocol):
    """A place of a training's state, as its costs see it."""

    @property
    def exact(self) -> bool:
        """Whether losses and weights are those of a training that is all on the device."""
        ...

    @property
    def left(self) -> Left | None:
        """What left the device; None: nothing."""
        ...

    def rates(self, machine: Machine) -> Rates:
        """The rates of `machine` and of the disk of its files."""
        ...


@dataclass(frozen=True)
class OnDevice:
    """All of it is on the device."""

    exact: bool = True
    left: Left | None = None

    def rates(self, machine: Machine) -> Rates:
        """As `Offload.rates`."""
        return host_rates(machine)


@dataclass(frozen=True)
class Load:
    """A training's sizes, as its offload needs them."""

    dims: ModelDims
    update: UpdateCost
    dtype: str
    passes: int = 1
    """Micro-batches of a step."""
    shards: int = 1
    """Ranks that have a share of the state each."""
    ranks: int = 1
    """Ranks on this host, which share its threads, its disk and its memory."""

    @property
    def weights(self) -> float:
        """Weights that a rank updates."""
        return self.dims.num_params / self.shards

    @property
    def layer_weights(self) -> float:
        """Weights of all layers."""
        return float(layer_matrix_params(self.dims))

    @property
    def state(self) -> float:
        """Bytes of a rank's masters and optimizer state."""
        return 4 * self.weights + self.update.state_bytes / self.shards

    @property
    def width(self) -> int:
        """Bytes of a weight in the passes."""
        return BYTES[self.dtype]

    @property
    def gradient_width(self) -> int:
        """Bytes of a summed gradient."""
        return 4 if self.passes > 1 else self.width


@dataclass(frozen=True)
class Places:
    """What is where: bytes that the device has less of, and that the host and the disk have."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Seconds of a step that leave the device's work as it is, and of those it adds."""

    update: float
    """The update: the longest of the host's step, the link and the disk, which run beside each other."""
    waits: float
    """For weights and gradients that take longer than the passes beside which they travel."""
    link_bytes: float
    disk_bytes: float
    said: str
    """Where the rates come from."""
    parts: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of the host's step, of the link and of the disk, of which the update takes the longest."""


def places(offload: Offload, load: Load, device: str) -> Places:
    """Where the state of a rank is. A CPU is its own host: what is on the host is in its memory too, beside its copies."""
    left = offload.left
    if left is None:
        return Places(said=("all on the device",))
    on_gpu, params = device.startswith("cuda"), load.weights
    half = load.width < 4
    largest = min(max(BUCKET, load.dims.vocab_size * load.dims.hidden_size), load.dims.num_params)
    buffers = 4.0 * load.width * largest
    window = load.state / max(params, 1) * min(WINDOW * BUFFERS, params)
    said, disk, host = (
        [f"optimizer state and masters {human_bytes(load.state)} in host memory"],
        0.0,
        buffers + load.state,
    )
    # Resident, float32 weights are their own masters, and half-precision ones are beside them.
    device_less = load.update.state_bytes / load.shards + (4 * params if half else 0.0)
    if left.to_files:
        disk = on_disk(left, load)
        kept = f", {human_bytes(load.state - disk)} of them in host memory" if load.state > disk else ""
        said = [f"optimizer state and masters {human_bytes(load.state)} on disk{kept}"]
        host = buffers + window + load.state - disk
    if left.gradients_leave:
        sums = load.gradient_width * params * (2 if left.delayed_update else 1)
        said.append(f"gradients {human_bytes(sums)} in host memory")
        host += sums
        device_less += load.gradient_width * params
    if left.streams:
        kept = load.width * load.layer_weights
        two = 2 * kept / max(load.dims.num_layers, 1)
        where = "on disk" if left.streams_files else "in host memory"
        said.append(f"layers' parameters {human_bytes(kept)} {where}")
        host += 1.5 * two if left.streams_files else kept
        disk += kept if left.streams_files else 0.0
        device_less += max(kept - two, 0.0)
    if left.delayed_update:
        host += load.width * params
    if not on_gpu:  # the host's bytes are the device's
        device_less -= host
    return Places(device_less, host, disk, tuple(said))


def times(offload: Offload, load: Load, machine: Machine, passes_s: float, rates: Rates | None = None) -> Times | None:
    """Seconds beside passes of `passes_s`; None: nothing leaves the device."""
    left = offload.left
    if left is None:
        return None
    rates = rates or offload.rates(machine)
    on_gpu = machine.device.startswith("cuda")
    params, link, waits = load.weights, 0.0, 0.0
    copies = COPIES_OF_MANY if machine.num_threads >= MANY else COPIES
    if on_gpu and copies == COPIES_OF_MANY and load.gradient_width == 4 and not left.gradients_leave:
        copies -= SCALED_BYTES
    computed = (load.update.moved_bytes / load.shards + copies * params) * load.ranks / rates.update
    moved = on_disk(left, load) if left.to_files else 0.0
    disk = moved * load.ranks * max(1 / rates.read, 1 / rates.write)
    passes = load.passes
    if left.gradients_leave:  # their norm is computed there, too
        computed += load.gradient_width * params * load.ranks / rates.update
    if left.streams:
        # A layer comes before its forward pass and before its backward pass, in which it is computed again if at all.
        brought = load.width * load.layer_weights
        link += (2 - 1 / max(load.dims.num_layers, 1)) * passes * brought  # the last one stays for the backward pass
        waits += _beyond(passes * brought, passes_s * SHARE_OF_FORWARD, rates, on_gpu)
        if left.streams_files:
            files = (2 - 1 / max(load.dims.num_layers, 1)) * passes * brought
            waits += max(files / rates.read - passes_s, 0.0) if on_gpu else files / rates.read
            disk += brought / rates.write
    if left.gradients_leave:
        gone = load.width * params * passes
        link += gone
        down = passes * load.width * load.layer_weights if left.streams else 0.0
        waits += _beyond(max(gone, down), passes_s * SHARE_OF_BACKWARD, rates, on_gpu)
        if passes > 1:  # the host adds them beside the next ones
            added = (passes - 1) * (load.width + 8) * params / rates.update
            waits += max(added - passes_s, 0.0) if on_gpu else added
    copied = 0.0 if left.gradients_leave else load.gradient_width * params
    back = 0.0 if left.streams else load.width * params
    link += copied + back
    on_link = max(copied, back) / rates.link if on_gpu else 0.0
    return Times(max(computed, on_link, disk), waits, link, 2 * moved, rates.said, (computed, on_link, disk))


def on_disk(left: Left, load: Load) -> float:
    """Bytes of a rank's masters and optimizer state that are in files."""
    return max(load.state - left.memory_bytes, 0.0)


def _beyond(num_bytes: float, beside: float, rates: Rates, on_gpu: bool) -> float:
    """Seconds that a pass waits for copies: on a CPU, which does one thing at a time, all of them, each read and written."""
    return max(num_bytes / rates.link - beside, 0.0) if on_gpu else 2 * num_bytes / rates.update


def stepped(
    step: Estimate, here: float, offload: Offload, load: Load, machine: Machine, rates: Rates | None = None
) -> Estimate:
    """The estimate of a step whose update, `here` seconds of it, is made elsewhere: after the passes, or delayed beside the next."""
    passes = step.value - here
    found = times(offload, load, machine, passes, rates)
    if found is None:
        return step
    delayed = not offload.exact
    value = max(passes + found.waits, found.update) if delayed else passes + found.waits + found.update
    waits = f", {found.waits:.3g} s more for weights and gradients that travel" if found.waits else ""
    beside = "beside the next passes" if delayed else "instead"
    formula = f"{step.formula}, on the host {found.update:.3g} s {beside}{waits} ({found.said})"
    return step.model_copy(update={"value": value, "formula": formula})


def estimate_left(offload: Offload, load: Load, machine: Machine) -> dict[str, Estimate]:
    """The figures of a step's offload; none where nothing leaves the device."""
    found = times(offload, load, machine, 0.0)  # passes of no length: `waits`, which is not read, is not that of a step
    if found is None:
        return {}
    made = {UPDATE_S: Estimate(value=found.update, unit="s", formula=f"a step's update on the host ({found.said})")}
    moved = f"a step's weights and gradients, {load.passes} passes"
    made[MOVED] = Estimate(value=found.link_bytes, unit="B", formula=moved, tolerance=0.05)
    if found.disk_bytes:
        said = f"masters and optimizer state {human_bytes(load.state)}, read and written"
        made[DISK] = Estimate(value=found.disk_bytes, unit="B", formula=said, tolerance=0.1)
    return made
