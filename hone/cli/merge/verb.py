"""The verb `merge`: writes a model with an adapter as a model folder without one."""

from __future__ import annotations

from hone.cli.options import at_most, circumstances, fields, list_fields, need

OF_MERGE = ("out", "device", "redo", "quiet")


def merge(words: list[str], options: dict[str, str]) -> int:
    """Adds an adapter to the weights of its model; returns 0."""
    from hone.base.errors import SpecError
    from hone.exports.merged.spec import MergeSpec

    if "help" in options:
        usage = "usage: hone merge ADAPTER_FOLDER --out=FOLDER [--redo] [--field=value ...]"
        about = "Adds the adapter to the weights of its model and writes a model folder; says how much of it rounding keeps."
        print(f"{usage}\n\n{about}\n\nfields:\n{list_fields(MergeSpec)}")
        return 0
    at_most(words, 1, "one ADAPTER_FOLDER")
    folder = need(words, "ADAPTER_FOLDER")
    if "out" not in options:
        raise SpecError("hone merge needs --out=FOLDER", fix="add --out=merged")
    spec = MergeSpec.from_overrides(fields(options, *OF_MERGE))
    from hone.exports.merged.write import merge as merge_folder

    print(merge_folder(folder, options["out"], spec, circumstances(options)).describe())
    return 0
