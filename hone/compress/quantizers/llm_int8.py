"""LLM.int8: 8-bit integers with one scale per row, stored for bitsandbytes, which splits off outliers at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.base import Quantizer

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix
    from hone.model.quantized.scheme import Scheme


class LLMInt8(Quantizer):
    """Rounds each row to 127 steps of its largest magnitude. Dettmers et al. 2022, arXiv:2208.07339.

    The paper's second part concerns inputs: bitsandbytes rounds them too, except features of at least `threshold`, which
    it multiplies in 16 bits. The features are found in every input, so the file holds the threshold alone. hone does not
    round inputs, and has no outliers to split off.
    """

    paper: ClassVar[str] = "arXiv:2208.07339"

    threshold: float = Field(
        6.0, ge=0, description="Magnitude of the inputs that bitsandbytes does not round; 0: all are."
    )

    def scheme(self, columns: int) -> Scheme:
        from hone.model.quantized.scheme import Scheme

        return Scheme(8, layout="llm-int8")

    def stored_scale_dtype(self, checkpoint_dtype: Any) -> Any:
        return self.as_dtype("float32")

    def config_options(self, dtype: str) -> dict[str, Any]:
        return {"llm_int8_threshold": self.threshold}

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.scale_dtype not in ("auto", "float32"):
            raise SpecError(
                f"{self.kind}: bitsandbytes stores float32 scales, not {self.scale_dtype}", fix="set scale_dtype=auto"
            )
        super().check(name, rows, columns)

    def apply(self, matrix: Matrix) -> None:
        import torch

        from hone.model.quantized.scheme import Stored

        weights = matrix.weight.float()
        largest = weights.abs().amax(1)
        steps = 127.0 / largest.clamp(min=torch.finfo(torch.float32).tiny)
        codes = (weights * steps.unsqueeze(1)).round_().to(torch.int8)
        raw, begin = {}, 0
        for count in matrix.modules or (len(weights),):
            raw[begin] = {"SCB": largest[begin : begin + count].contiguous()}
            begin += count
        scales = (largest / 127).unsqueeze(1)
        matrix.stored = Stored(self.scheme(weights.shape[1]), codes, scales, raw=raw)
