"""TCP connections between ranks that do not wait for each other: one from each rank to each other one, and raw tensors on them."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from hone.base.errors import MachineError
from hone.base.ranks import Lost, Mesh

_CONNECT_S = 20.0
"""Seconds in which all ranks have connected: they have met just before."""

_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Of a peer that neither sends nor ends, because its host did, a connection ends after 20 seconds. A slow peer's host answers."""

_HELLO = struct.Struct("!32sI")
"""The secret of this training and the rank that connects."""


class Connections:
    """A TCP connection `to` each other rank of `mesh` and one `of` each; all ranks make them at the same time.

    gloo is not taken for these messages, because it ends a connection on which a message was waited for too long, and here a
    rank may be late for as long as it likes. Who connects must know a secret that rank 0 drew. `close` wakes all who wait.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.rank, mesh.world_size
        self.to: dict[int, socket.socket] = {}
        self.of: dict[int, socket.socket] = {}
        self.sent: Counter[str] = Counter()
        """Bytes of tensors that this rank has sent, by what for."""
        self._counting = threading.Lock()
        mesh.at_close(lambda _: self.close())
        secret = mesh.from_leader(lambda: secrets.token_bytes(32))
        with _listening(self.size) as listening:
            places = mesh.gather(listening.getsockname()[:2])
            try:
                for step in range(1, self.size):  # not all ranks to the same one at once
                    peer = (self.rank + step) % self.size
                    self.to[peer] = _steady(socket.create_connection(places[peer], _CONNECT_S))
                    self.to[peer].sendall(_HELLO.pack(secret, self.rank))
                self._accept(listening, secret)
            except OSError as error:
                raise MachineError(
                    f"rank {self.rank} cannot connect to the other ranks at {', '.join(f'{a}:{p}' for a, p in places)}: {error}",
                    fix="set GLOO_SOCKET_IFNAME to the network interface by which the hosts reach each other",
                ) from error

    def _accept(self, listening: socket.socket, secret: bytes) -> None:
        until = time.monotonic() + _CONNECT_S
        while len(self.of) < self.size - 1:
            listening.settimeout(max(until - time.monotonic(), 1e-3))
            one, _ = listening.accept()
            one.settimeout(max(until - time.monotonic(), 1e-3))
            hello = bytearray(_HELLO.size)
            with suppress(OSError, EOFError):
                _read(one, memoryview(hello))
            said, peer = _HELLO.unpack(hello)
            if hmac.compare_digest(said, secret) and peer < self.size:
                self.of[peer] = _steady(one)
            else:  # a stranger's
                one.close()

    def send(self, peer: int, on: socket.socket, header: bytes, tensor: Tensor, what: str) -> None:
        """Sends `header` and the numbers of a contiguous CPU `tensor` to `peer`. Raises `Lost`."""
        with self.losing(peer):
            on.sendall(header)
            on.sendall(_bytes_of(tensor))
        with self._counting:
            self.sent[what] += tensor.nbytes

    def receive(self, peer: int, on: socket.socket, header: struct.Struct, tensor: Tensor) -> tuple[int | float, ...]:
        """What `peer` sent by `send`: its header, and its numbers into the contiguous CPU `tensor`. Raises `Lost`."""
        with self.losing(peer):
            head = bytearray(header.size)
            _read(on, memoryview(head))
            _read(on, _bytes_of(tensor))
        return header.unpack(head)

    @contextmanager
    def losing(self, peer: int) -> Iterator[None]:
        """Raises `Lost` where the connection with `peer` ends; then all others do, so that no rank waits for one that waits."""
        try:
            yield
        except (OSError, EOFError) as error:
            self.close()
            raise Lost.of(f"rank {self.rank} lost rank {peer}", error) from None

    def close(self) -> None:
        """Ends all connections; who waits on one gets an error."""
        for one in (*self.to.values(), *self.of.values()):
            with suppress(OSError):  # the other side may have ended it
                one.shutdown(socket.SHUT_RDWR)


def own_address() -> tuple[socket.AddressFamily, str]:
    """The address by which other ranks reach this one: of the interface GLOO_SOCKET_IFNAME, else of the way to MASTER_ADDR."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, suppress(OSError):
            found = fcntl.ioctl(one.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            return socket.AF_INET, socket.inet_ntoa(found[20:24])
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "1")
    family, *_, there = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect(there)  # sends nothing
        return family, str(one.getsockname()[0])


def _listening(size: int) -> socket.socket:
    family, host = own_address()
    return socket.create_server((host, 0), family=family, backlog=size)


def _steady(one: socket.socket) -> socket.socket:
    """`one` without delays of small messages and without a limit of time, but with looks for whether the other host is there."""
    one.settimeout(None)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return one


def _read(one: socket.socket, into: memoryview) -> None:
    while len(into):
        count = one.recv_into(into)
        if not count:
            raise EOFError("it ended the connection")
        into = into[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
