"""PiSSA: LoRA that begins as the largest singular directions of each weight, which the frozen weight loses.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from hone.base.errors import SpecError
from hone.model.adapters.base import Adapter
from hone.model.adapters.lora import LoRA
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import Tensor, nn


class PiSSA(LoRA):
    """y = (W - s B0 A0) x + s B A x; A and B begin as A0 [r, K] and B0 [N, r], where s B0 A0 is the best approximation of W of rank r. Saved as LoRA of rank 2 r beside W itself. Meng et al. 2024, arXiv:2404.02948."""

    paper: ClassVar[str] = "arXiv:2404.02948"
    stored: ClassVar[dict[str, str]] = {
        **LoRA.stored,
        "lora_first_A": "lora_first_A.weight",
        "lora_first_B": "lora_first_B.weight",
    }

    @model_validator(mode="after")
    def _one_rank(self) -> PiSSA:
        if (self.rank_pattern or self.alpha_pattern) and self.use_rslora:
            raise ValueError("pissa is saved with twice the ranks: give patterns or use_rslora, not both")
        return self

    def check(self, config: Any) -> None:
        """As `LoRA.check`; raises SpecError where a weight has fewer directions than the rank: of the whole model, since a
        tensor-parallel rank has parts of the same directions."""
        super().check(config)
        linears = [(index, *one) for index in range(config.num_layers) for one in config.linears(index).items()]
        for linear, wrapped in ((one[2], config.wrappers(*one)) for one in linears):
            for piece, rank in ((piece, one.of_piece(piece.name).rank) for one, pieces in wrapped for piece in pieces):
                if rank > (most := min(piece.out_features, linear.in_features)):
                    raise SpecError(
                        f"pissa of rank {rank} takes more directions than the {most} that the weight of '{piece.name}' has",
                        fix=f"give adapter.rank of at most {most}, or rank_pattern a smaller one for it",
                    )

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        trained = super().parameters(linear, pieces)
        first = (
            ParameterSpec(one.name.replace("lora_", "lora_first_"), one.shape, (0.0, 0.0), trained=False)
            for one in trained
        )
        return (*trained, *first)

    def first_values(self, module: nn.Module) -> dict[str, Tensor]:
        """The largest singular directions of the weight: A0 and B0, as A_PIECE and B_PIECE, float32. Raises SpecError for one that is not of floats."""
        import torch

        from hone.model.linear import Dense

        if not isinstance(module.inner, Dense):
            raise SpecError(
                "pissa takes a part of each weight, and the model's are quantized", fix="take adapter.kind: lora"
            )
        found = {}
        for piece, rows in module.rows():
            if piece in module.pieces:
                own = self.of_piece(piece.name)
                whole = module.inner.weight.detach()[rows].float()
                left, values, right = torch.linalg.svd(whole, full_matrices=False)
                root = (values[: own.rank] / own.scale).sqrt()
                found[f"A_{piece.name}"] = root[:, None] * right[: own.rank]
                found[f"B_{piece.name}"] = left[:, : own.rank] * root
        return found

    def start(self, module: nn.Module, first: Mapping[str, Tensor]) -> None:
        """Takes these directions from the weight."""
        weight = module.inner.weight.detach()
        for piece, rows in module.rows():
            if piece in module.pieces:
                down, up = (first[f"{name}_{piece.name}"].to(weight.device) for name in "AB")
                for name, value in (("A", down), ("B", up)):
                    for kind in ("lora", "lora_first"):
                        getattr(module, f"{kind}_{name}_{piece.name}").detach().copy_(value)
                weight[rows] -= (self.of_piece(piece.name).scale * (up @ down)).to(weight.dtype)

    def exported(self, tensors: Mapping[str, Tensor]) -> tuple[Adapter, dict[str, Tensor]]:
        """LoRA of twice the rank, [A; A0] and [B, -B0]: on the model as it was it computes the same."""
        import torch

        values = self.model_dump(mode="json") | {"kind": "lora", "use_rslora": False, "dropout": 0.0}
        ranks = {name: 2 * rank for name, rank in self.rank_pattern.items()}
        alphas = {name: 2 * alpha for name, alpha in self.alpha_pattern.items()}
        found = {}
        for key, value in tensors.items():
            if "lora_first_" in key:
                continue
            if ".lora_" not in key:  # a weight of the model itself
                found[key] = value
                continue
            first = tensors[key.replace(".lora_", ".lora_first_")]
            found[key] = torch.cat([value, first]) if ".lora_A." in key else torch.cat([value, -first], 1)
        return LoRA.model_validate(
            values
            | {
                "rank": 2 * self.rank,
                "alpha": 2 * self.rank * self.scale,
                "rank_pattern": ranks,
                "alpha_pattern": alphas,
            }
        ), found

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> PiSSA | None:
        """None: it is saved as LoRA."""
        return None
