"""What a container grants: processor time, memory and memory nodes, from the cgroups of this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list: '0-3,8' is (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def lines_of(path: Path) -> list[str]:
    """The lines of a small file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf8").splitlines()
    except (OSError, ValueError):
        return []


def word_of(path: Path) -> str:
    """The first line of a small file; "" where there is none."""
    return next(iter(lines_of(path)), "").strip()


def processor_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that the cgroups (v2 or v1) grant; None without a limit.

    A limit of any cgroup above this process's own binds, too.
    """
    found = []
    for path in _files(root, "cpu.max", ""):
        quota, _, period = word_of(path).partition(" ")
        if quota.isdigit():
            found.append(int(quota) / int(period or 100_000))
    for path in _files(root, "cpu.cfs_quota_us", "cpu"):
        quota, period = word_of(path), word_of(path.with_name("cpu.cfs_period_us"))
        if quota.isdigit():  # -1: none
            found.append(int(quota) / int(period or 100_000))
    return min(found, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroups (v2 or v1) grant; None without a limit. v1 writes one near 2**63 for none."""
    paths = (*_files(root, "memory.max", ""), *_files(root, "memory.limit_in_bytes", "memory"))
    found = [int(word) for path in paths if (word := word_of(path)).isdigit() and int(word) < 1 << 62]
    return min(found, default=None)


def allowed_memory_nodes(root: Path = ROOT) -> tuple[int, ...] | None:
    """The memory nodes that this process may use (its cpuset); None where the kernel does not tell."""
    for line in lines_of(root / "proc/self/status"):
        if line.startswith("Mems_allowed_list:"):
            return numbers(line.partition(":")[2])
    return None


def _files(root: Path, name: str, controller: str) -> Iterable[Path]:
    """Control file `name` in this process's cgroup and those above it; the root's where its own is not visible."""
    base = root / "sys/fs/cgroup" / controller
    places = [base]
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [one for one in path.split("/") if one and one != ".."]
            places += [base.joinpath(*parts[: count + 1]) for count in range(len(parts))]
    return [place / name for place in places if (place / name).exists()]
