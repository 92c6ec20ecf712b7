"""Reads the files of a probe and of a calibration, and finds every wrong value before anything is drawn."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.errors import ArtifactError

PROBE, CALIBRATION = "probe.json", "calibration.json"
VERSION = 1
_AGAIN = "measure the machine again: hone calibrate --report"


@dataclass(frozen=True)
class Found:
    """A probe and, where there is one, the calibration measured with it; both as their files hold them."""

    probe: dict[str, Any]
    calibration: dict[str, Any] | None

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a list in the probe."""
        return list(self.probe.get(name) or ())

    def rates(self, name: str) -> list[dict[str, Any]]:
        """The rows of a list in the calibration."""
        return list((self.calibration or {}).get(name) or ())


def read(folder: Path) -> Found:
    """What `folder` holds. Raises ArtifactError without a probe, or for a file that is none or of another version."""
    probe = _file(folder / PROBE)
    if probe.get("version") != VERSION:
        raise ArtifactError(
            f"{folder / PROBE} has version {probe.get('version')}, this hone reads {VERSION}", fix=_AGAIN
        )
    missing = [name for name in ("processor", "made_at", "topology", "levels") if name not in probe]
    if missing:
        raise ArtifactError(f"{folder / PROBE} has no {missing[0]}", fix=_AGAIN)
    calibration = folder / CALIBRATION
    return Found(probe, _file(calibration) if calibration.exists() else None)


def _file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", fix=_AGAIN) from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} holds no mapping", fix=_AGAIN)
    return found


def value(sample: dict[str, Any] | None) -> float | None:
    """The median of a sample; None where it was not measured, or is no positive number."""
    found = sample.get("value") if isinstance(sample, dict) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) and found > 0 else None
