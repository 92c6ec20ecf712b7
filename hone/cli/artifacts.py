"""An artifact in a terminal: its name, its figures with their estimates, what of its spec is not the default."""

from __future__ import annotations

import json
from typing import Any

from hone.base.artifact import Artifact
from hone.base.errors import HoneError
from hone.base.figure import human_bytes
from hone.base.spec import dump_yaml
from hone.recipe import stage_class


def describe_artifact(artifact: Artifact, *, whole: bool = False) -> str:
    """An artifact in a few lines for a terminal: its name, its figures with their estimates, its files' size; what of its spec
    differs from the defaults, or the `whole` spec."""
    foreign = artifact.kind == "foreign"
    on_disk = [path.stat().st_size for path in artifact.folder.rglob("*") if foreign and path.is_file()]
    sizes = on_disk if foreign else [row["bytes"] for row in artifact.manifest["files"].values()]
    lines = [
        f"{artifact.kind}-{artifact.name}  {artifact.fingerprint}  {human_bytes(sum(sizes))} in {len(sizes)} files"
    ]
    if foreign:
        return f"{lines[0]}\n  a Hugging Face folder without hone.json"
    for role in artifact.manifest["parents"]:
        lines.append(f"  from {role['role']}: {role['name']} ({role['fingerprint']})")
    for figure in artifact.figures.values():
        value = "absent" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        estimate = ""
        if figure.estimate is not None:
            label = "limit" if figure.estimate.bound else "predicted"
            estimate = f"  ({label} {figure.estimate.value:.4g})"
        lines.append(f"  {figure.name:24} {value}{estimate}{'  ' + figure.note if figure.note else ''}")
    if artifact.changed is not None:
        lines.append(f"  changed after it was made: {artifact.changed}")
    spec = artifact.manifest["spec"]
    if whole:
        lines += ["spec:", *(f"  {line}" for line in dump_yaml(spec).splitlines())]
    elif chosen := _chosen(artifact.kind, spec):
        lines.append(f"  made with {chosen}")
    return "\n".join(lines)


def _chosen(kind: str, spec: dict[str, Any]) -> str:
    """What a stage's stored spec sets besides defaults, in one line; "" for nothing, or a spec that this hone cannot read."""
    try:
        chosen = stage_class(kind).read(spec).model_dump(mode="json", exclude_defaults=True)
    except HoneError:
        return ""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in chosen.items())
