"""Identity: what an artifact is made from, the fingerprint of that, and the first place where two differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hone.base.durable import sha256
from hone.base.errors import SpecError
from hone.base.spec import EARLIER, Spec, fingerprint


class Parent(Protocol):
    """What is asked of an artifact that another one is made from."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def identify(
    out: Path, kind: str, spec: Spec, parents: Mapping[str, Parent], files: Mapping[str, Path], machine: dict[str, Any]
) -> dict[str, Any]:
    """The part of hone.json that is known before the work: what `out` is made from, its fingerprint, and `machine`.

    The whole spec is kept; its circumstances are no part of the fingerprint.
    """
    row: dict[str, Any] = {
        "kind": kind,
        "name": out.name.removeprefix(f"{kind}-"),
        "spec": spec.model_dump(mode="json"),
        "parents": [
            {"role": role, "name": f"{parent.kind}-{parent.name}", "fingerprint": parent.fingerprint}
            for role, parent in parents.items()
        ],
        "input_files": {name: sha256(path)[:16] for name, path in files.items()},
    }
    return {**row, "fingerprint": fingerprint(_made_from(row, spec.identity())), "machine": machine}


def same(before: dict[str, Any], now: dict[str, Any], kind: type[Spec] | None) -> bool:
    """Whether two manifests are of the same: equal fingerprints, or, of an earlier hone's `before`, equal as read today."""
    if before["fingerprint"] == now["fingerprint"]:
        return True
    spec = _today(before, kind)
    return spec is not None and fingerprint(_made_from(before, spec)) == now["fingerprint"]


def drift(before: dict[str, Any], now: dict[str, Any], kind: type[Spec] | None = None) -> str:
    """The first field in which what two manifests' artifacts are made from differs. `kind`: the spec of `now`."""
    specs = [_today(one, kind) or one["spec"] for one in (before, now)]
    return difference(*(_made_from(one, spec) for one, spec in zip((before, now), specs, strict=True)))


def foreign_to_today(before: dict[str, Any], kind: type[Spec] | None) -> bool:
    """Whether the spec in a manifest cannot be read as a spec of today: an earlier hone had other options."""
    return kind is not None and _today(before, kind) is None


def _today(manifest: dict[str, Any], kind: type[Spec] | None) -> dict[str, Any] | None:
    """The identity of a manifest's spec as `kind` reads it today; None when it cannot."""
    try:
        return None if kind is None else kind.read(manifest["spec"], EARLIER).identity()
    except SpecError:
        return None


def _made_from(manifest: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """What a fingerprint is of: kind, `spec`, the parents' fingerprints by role, hashes of files if there are any."""
    made_from = {"kind": manifest["kind"], "spec": spec}
    made_from["parents"] = {row["role"]: row["fingerprint"] for row in manifest["parents"]}
    files = manifest.get("input_files", {})
    return {**made_from, "files": files} if files else made_from


def difference(before: Any, now: Any, path: str = "") -> str:
    """The first field in which two specs differ: 'spec.steps was 10, is 20'; '' when they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            found = difference(before.get(key, "absent"), now.get(key, "absent"), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return ""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for position, (one, other) in enumerate(zip(before, now, strict=True)):
            found = difference(one, other, f"{path}.{position}")
            if found:
                return found
        return ""
    return "" if before == now else f"{path} was {before!r}, is {now!r}"
