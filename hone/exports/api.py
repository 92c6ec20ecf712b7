"""`hone.export`: a model folder as one file of another program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hone.base.run import Run
from hone.exports import EXPORTS
from hone.exports.base import Export, Exported

if TYPE_CHECKING:
    from torch import Tensor


def export(
    model: Path | str,
    out: Path | str,
    run: Run | None = None,
    importance: Mapping[str, Tensor] | None = None,
    *,
    format: str = "gguf",
    **options: Any,
) -> Exported:
    """Writes the model folder `model`, dense or quantized by hone, as the file `out`; `options` are fields of the format.

    `importance` weights what is rounded: by checkpoint module, float32 [columns], the mean square of its inputs. The file
    appears when it is whole. Raises SpecError for a model that the file's readers compute otherwise, ArtifactError for a folder
    that is no model or a file that exists (`run.redo` replaces it) or that another process writes, FitError when the disk is
    too small.
    """
    spec = cast(Export, EXPORTS.read({"kind": format, **options}))
    return spec.export(model, out, run or Run(quiet=True), importance)
