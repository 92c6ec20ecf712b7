"""The adapters that requests may name: which are on disk, in host memory and in slots, and which may leave them.

The engine's thread owns this object; `read` alone may run in any thread. An adapter moves disk -> host memory -> slot when a sequence
needs it, and those that were used longest ago make room. A sequence keeps the adapter that it began with: one that is loaded again
under its name is another one, with another hash.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count

import torch

from hone.base.errors import ArtifactError, HoneError, SpecError
from hone.model.decoder import Decoder
from hone.serve.adapters.layout import SlotLayout
from hone.serve.adapters.reading import HostAdapter, check_base, read_adapter
from hone.serve.adapters.slots import AdapterSlots, with_slots
from hone.serve.adapters.spec import LoRASpec


@dataclass(eq=False)
class ServedAdapter:
    """One content under one name."""

    name: str
    path: str
    content: str
    host: HostAdapter | None
    slot: int | None = None
    num_seqs: int = 0
    """Requests with it that have not ended."""
    num_running: int = 0
    """Of these, sequences that take part in steps: its slot stays."""
    used: int = 0
    """Larger for one that was used later."""
    removed: bool = False
    reading: Future[HostAdapter] | None = None


class Adapters:
    """The adapters of one engine."""

    def __init__(self, model: Decoder, spec: LoRASpec, device: torch.device) -> None:
        assert spec.max_loras is not None, "the engine serves adapters"
        check_base(model.config)
        self._base, self._pin = model, device.type == "cuda"
        self._max_rank, self._max_cpu = spec.max_lora_rank, spec.max_cpu_loras
        self.layout = SlotLayout.of(model.config, spec.max_lora_rank)
        if not self.layout.linears:
            raise SpecError(
                "engine.lora.max_loras is set, and no linear of this model takes adapters while it is served",
                fix="leave engine.lora.max_loras out, and merge the adapter into the model (hone merge)",
            )
        self.slots = AdapterSlots(self.layout, spec.max_loras, model.dtype, device)
        self.model = with_slots(model, self.slots)
        self.slots.compile_kernels(self.model)
        self._in_slot: list[ServedAdapter | None] = [None] * spec.max_loras
        self._named: dict[str, ServedAdapter] = {}
        self._known: list[ServedAdapter] = []
        """Those with a name, and those that sequences still have."""
        self._turn = count(1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="hone-adapters")
        self._waiters: list[tuple[ServedAdapter, Callable[[], None]]] = []
        self.num_fills = 0
        for name, path in spec.named_paths().items():
            self.load(name, path)

    # ---- loading and unloading ----------------------------------------------------------------------------------------

    def read(self, name: str, path: str) -> HostAdapter:
        """Reads and checks an adapter without a change to this object; in any thread. Errors as `read_adapter`."""
        return read_adapter(name, path, self._base, self.layout, max_lora_rank=self._max_rank, pin=self._pin)

    def check_name(self, name: str, *, load_inplace: bool = False) -> None:
        """Raises SpecError for a name that is empty, or taken unless `load_inplace`."""
        if not name:
            raise SpecError("the adapter has no name", fix="give lora_name, by which requests ask for it")
        if name in self._named and not load_inplace:
            raise SpecError(
                f"The lora adapter '{name}' has already been loaded.",
                fix="give another name, unload it first, or set load_inplace to replace it",
            )

    def add(self, host: HostAdapter, *, load_inplace: bool = False) -> None:
        """Makes an adapter known; with `load_inplace` in the place of another of its name. Raises SpecError as `check_name`."""
        self.check_name(host.name, load_inplace=load_inplace)
        before = self._named.get(host.name)
        if before is not None:
            self._drop_name(before)
        made = ServedAdapter(host.name, host.path, host.content, host, used=next(self._turn))
        self._named[host.name] = made
        self._known.append(made)
        self._trim()

    def load(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """`read` and `add`, for a caller that may wait."""
        self.check_name(name, load_inplace=load_inplace)
        self.add(self.read(name, path), load_inplace=load_inplace)

    def remove(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        """Takes the name away at once; the memory goes, and `then` is called, when its last sequence has ended.

        Raises SpecError for an unknown name.
        """
        found = self.find(name)
        self._drop_name(found)
        if found.num_seqs:
            self._waiters.append((found, then))
        else:
            then()

    def find(self, name: str) -> ServedAdapter:
        """The adapter of this name. Raises SpecError where there is none."""
        if name not in self._named:
            some = f"it has {', '.join(list(self._named)[:10])}" if self._named else "it has none"
            raise SpecError(f"no adapter '{name}' is loaded; {some}", fix="load it first (/v1/load_lora_adapter)")
        return self._named[name]

    def names(self) -> dict[str, ServedAdapter]:
        """The loaded ones by name."""
        return dict(self._named)

    def _drop_name(self, adapter: ServedAdapter) -> None:
        del self._named[adapter.name]
        adapter.removed = True
        if not adapter.num_seqs:
            self._forget(adapter)

    def _forget(self, adapter: ServedAdapter) -> None:
        if adapter.slot is not None:
            self._in_slot[adapter.slot] = adapter.slot = None
        adapter.host = None
        self._known.remove(adapter)

    # ---- sequences ----------------------------------------------------------------------------------------------------

    def leave(self, adapter: ServedAdapter) -> None:
        """A request with it, counted in its `num_seqs`, has ended."""
        adapter.num_seqs -= 1
        if adapter.num_seqs:
            return
        if adapter.removed:
            self._forget(adapter)
        done = [then for one, then in self._waiters if one is adapter]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] is not adapter]
        for then in done:
            then()

    def can_run(self, adapter: ServedAdapter) -> bool:
        """Whether a sequence with it may start now; if only its factors are missing in host memory, they are being read."""
        if adapter.slot is not None:
            return True
        if adapter.host is None:
            self._read_again(adapter)
            return False
        return self._free_slot() is not None

    def take(self, adapter: ServedAdapter) -> int:
        """The slot of a sequence that starts, filled if it must be; after `can_run` said yes."""
        if adapter.slot is None:
            slot = self._free_slot()
            assert slot is not None and adapter.host is not None, "can_run said yes"
            before = self._in_slot[slot]
            if before is not None:
                before.slot = None
            self.slots.fill(slot, adapter.host)
            self.num_fills += 1
            self._in_slot[slot], adapter.slot = adapter, slot
        adapter.num_running += 1
        adapter.used = next(self._turn)
        return adapter.slot

    def release(self, adapter: ServedAdapter) -> None:
        """A sequence with it takes part in steps no more."""
        adapter.num_running -= 1
        self._trim()

    def _free_slot(self) -> int | None:
        """An empty slot, or that of the adapter used longest ago among those without running sequences; None: all run."""
        ages = [
            (0 if one is None else one.used, slot)
            for slot, one in enumerate(self._in_slot)
            if one is None or not one.num_running
        ]
        return min(ages)[1] if ages else None

    # ---- host memory --------------------------------------------------------------------------------------------------

    def _trim(self) -> None:
        """Lets go of the host copies beyond `max_cpu_loras`, those used longest ago; what runs is in its slot."""
        held = sorted((one for one in self._known if one.host is not None), key=lambda one: one.used)
        for one in held[: max(0, len(held) - (self._max_cpu or len(held)))]:
            one.host = None

    def _read_again(self, adapter: ServedAdapter) -> None:
        if adapter.reading is None:
            adapter.reading = self._threads.submit(self.read, adapter.name, adapter.path)

    def poll(self) -> list[tuple[ServedAdapter, str]]:
        """Takes in what was read; returns the adapters that could not be, with the error by which their requests end."""
        failed = []
        for one in [one for one in self._known if one.reading is not None]:
            if not one.reading.done():
                continue
            reading, one.reading = one.reading, None
            try:
                host = reading.result()
                if host.content != one.content:
                    raise ArtifactError(f"the files in {one.path} are not those that were loaded", fix="load it again")
                one.host, one.used = host, next(self._turn)
                self._trim()
            except Exception as error:
                said = error.what if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"
                failed.append((one, f"adapter '{one.name}' had left host memory and cannot be read again: {said}"))
        return failed

    def wait_a_moment(self, seconds: float) -> bool:
        """For an engine that has nothing else to run: whether an adapter is being read, for which this waits up to `seconds`."""
        reading = [one.reading for one in self._known if one.reading is not None]
        wait(reading, seconds, return_when=FIRST_COMPLETED)
        return bool(reading)

    def stats(self) -> dict[str, float]:
        """Figures for `Engine.stats`."""
        return {
            "adapters": len(self._named),
            "adapters_in_host_memory": sum(one.host is not None for one in self._known),
            "adapter_slots": len(self._in_slot),
            "adapter_slots_running": sum(one is not None and one.num_running > 0 for one in self._in_slot),
            "adapter_fills": self.num_fills,
        }


def found_adapter(adapters: Adapters | None, name: str) -> ServedAdapter | None:
    """The adapter that a request names, None where it names none. Raises SpecError for one that is not there."""
    if not name:
        return None
    if adapters is None:
        raise SpecError(f"adapter '{name}' is asked for, and the engine serves none", fix="set engine.lora.max_loras")
    return adapters.find(name)
