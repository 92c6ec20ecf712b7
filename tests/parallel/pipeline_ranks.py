"""What each rank does in the tests of the pipeline's executor, and the same training in one process."""

from __future__ import annotations

import os
import signal
import types

import torch
from torch import Tensor, nn

from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.cost.pipeline.table import Op, Table
from hone.parallel.pipeline.executor import Channels, Executor
from hone.parallel.pipeline.schedules import SCHEDULES
from tests.waiting import wait_until

WIDTH, ROWS, LR = 16, 6, 0.05
LIKE = torch.empty(2, ROWS, WIDTH)
ASYNCHRONOUS = {"pipedream", "pipedream_vertical", "pipedream_2bw"}


class Block(nn.Module):
    """A residual block with a norm's weight, whose gradient no linear makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(stages: int) -> list[nn.Module]:
    """The model's stages, the same in every process."""
    torch.manual_seed(0)
    return [Block() for _ in range(stages)]


def data(count: int) -> tuple[list[Tensor], list[Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return tuple([torch.randn(2, ROWS, WIDTH, generator=drawn) for _ in range(count)] for _ in range(2))


def error(y: Tensor, target: Tensor, count: int) -> Tensor:
    return (y - target).square().mean() / count


def descend(module: nn.Module) -> None:
    """A step in place, as torch's optimizers do it."""
    with torch.no_grad():
        for one in module.parameters():
            one.sub_(LR * one.grad)
            one.grad = None


def synchronous(stages: int, count: int) -> tuple[list[nn.Module], list[float]]:
    """Stages with the gradients of all microbatches, and the losses, of one process that knows no schedule."""
    parts, losses = model(stages), []
    for x, target in zip(*data(count), strict=True):
        for part in parts:
            x = part(x)
        loss = error(x, target, count)
        loss.backward()
        losses.append(loss.item())
    return parts, losses


def asynchronous(name: str, p: int, count: int) -> tuple[list[nn.Module], list[float]]:
    """PipeDream in one process by its definition: which step's weights each stage reads for each microbatch."""
    each = p if name == "pipedream_2bw" else 1
    parts, losses = model(p), []
    history = [[[one.detach().clone() for one in part.parameters()]] for part in parts]
    for number, (x, target) in enumerate(zip(*data(count), strict=True)):
        for stage, part in enumerate(parts):
            read = {
                "pipedream": max(0, number - (p - 1 - stage)),
                "pipedream_vertical": max(0, number - (p - 1)),
                "pipedream_2bw": max(0, number // p - 1),
            }[name]
            for one, value in zip(part.parameters(), history[stage][read], strict=True):
                one.data = value.clone()
            x = part(x)
        loss = error(x, target, 1)
        losses.append(loss.item())
        loss.backward()
        if (number + 1) % each == 0:
            for part, versions in zip(parts, history, strict=True):
                grads = [one.grad for one in part.parameters()]
                versions.append([value - LR * grad for value, grad in zip(versions[-1], grads, strict=True)])
                part.zero_grad()
    for part, versions in zip(parts, history, strict=True):
        for one, value in zip(part.parameters(), versions[-1], strict=True):
            one.data = value
    return parts, losses


def piped(settings: list[tuple[str, int, dict]]) -> list[list]:
    """Runs each (schedule, microbatches, options): [largest difference of weights or gradients, of losses, parameters]."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), []
    p = mesh.world_size
    with mesh.together():
        channels = Channels(mesh, [range(p)], "cpu")
        for name, count, options in settings:
            table = SCHEDULES[name](p, count, **options)
            late = name in ASYNCHRONOUS
            executor, losses = _executor(table, channels, 1 if late else count)
            executor.run(LIKE)
            parts, wanted = asynchronous(name, p, count) if late else synchronous(table.stages, count)
            found.append(_differences(mesh, executor, parts, losses, wanted, late))
    return found


def _executor(table: Table, channels: Channels, share: int) -> tuple[Executor, dict[int, Tensor]]:
    """An executor, and where its losses appear."""
    inputs, targets = data(table.microbatches)
    parts, losses = model(table.stages), {}
    mine = {stage: parts[stage] for stage in table.held(channels.index)}

    def passes(stage: int, number: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        y = mine[stage](inputs[number] if x is None else x)
        if stage < table.stages - 1:
            return y, None
        loss = error(y, targets[number], share)
        losses[number] = loss.detach()
        return None, loss

    return Executor(table, channels, mine, passes, step=lambda stage: descend(mine[stage])), losses


def _differences(
    mesh: Mesh, executor: Executor, parts: list[nn.Module], losses: dict[int, Tensor], wanted: list[float], late: bool
) -> list:
    largest = 0.0
    for stage, part in enumerate(parts):
        for index, right in enumerate(part.parameters()):
            mine = list(executor.stages[stage].parameters())[index] if stage in executor.stages else None
            if late:
                largest = max(largest, 0.0 if mine is None else (mine - right).abs().max().item())
                continue
            if mine is not None:
                assert mine.grad is not None, f"a gradient of stage {stage} is lost"
            shared = executor.table.name == "DualPipe"  # two ranks have the stage, and add what each has
            grad = torch.zeros_like(right) if mine is None else mine.grad
            grad = mesh.sum(grad.clone()) if shared else grad
            if mine is not None:
                largest = max(largest, (grad - right.grad).abs().max().item())
    off = max((abs(float(loss) - wanted[number]) for number, loss in losses.items()), default=0.0)
    return [largest, off, len(losses)]


def killed(name: str, count: int, at: list) -> str:
    """What this rank raises when rank 1 is killed before its pass `at`."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    try:
        with mesh.together():
            executor, _ = _executor(
                SCHEDULES[name](mesh.world_size, count), Channels(mesh, [range(mesh.world_size)], "cpu"), count
            )
            if mesh.rank == 1:
                _before(executor, Op(*at), lambda: os.kill(os.getpid(), signal.SIGKILL))
            executor.run(LIKE)
    except HoneError as lost:
        return str(lost)
    return "nothing"


def late(name: str, count: int, at: list, timeout_s: float, slow: bool) -> str:
    """What this rank raises when pass `at` of rank 1 does not end before another rank has, or the message that it sends is lost.

    Rank 2, which needs it, waits `timeout_s` for each message, the others so long that they do not end before it.
    """
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    try:
        with mesh.together():
            patience = timeout_s if mesh.rank == 2 else 100.0
            channels = Channels(mesh, [range(mesh.world_size)], "cpu", patience)
            executor, _ = _executor(SCHEDULES[name](mesh.world_size, count), channels, count)
            if mesh.rank == 1 and slow:
                _before(executor, Op(*at), lambda: wait_until(mesh.broken, lambda: "no rank has failed"))
            elif mesh.rank == 1:
                _before(executor, Op(*at), _drop_next)
            executor.run(LIKE)
    except HoneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _drop_next() -> None:
    """The next message of this rank is not sent."""
    send = torch.distributed.isend

    def lost(*_, **__):
        torch.distributed.isend = send
        return types.SimpleNamespace(wait=lambda: None)

    torch.distributed.isend = lost


def failing(name: str, count: int, at: list) -> str:
    """What this rank raises when pass `at` of rank 1 fails."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    try:
        with mesh.together():
            executor, _ = _executor(
                SCHEDULES[name](mesh.world_size, count), Channels(mesh, [range(mesh.world_size)], "cpu"), count
            )
            if mesh.rank == 1:
                _before(executor, Op(*at), lambda: 1 // 0)
            executor.run(LIKE)
    except (HoneError, ZeroDivisionError) as one:
        return f"{type(one).__name__}: {one} {getattr(one, '__notes__', '')}"
    return "nothing"


def _before(executor: Executor, at: Op, act) -> None:
    """Makes the forward of the stage of `at` act when its microbatch comes."""
    seen = []

    def hook(*_) -> None:
        seen.append(1)
        if len(seen) == at.microbatch + 1:
            act()

    executor.stages[at.stage].register_forward_pre_hook(hook)
