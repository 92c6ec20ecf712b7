"""A linear whose weight is stored as two thin factors for each checkpoint module. Only hone reads such folders.

config.json says `{"quant_method": "low_rank", "ignore": [dense modules]}`; a module has `factor_a` [r, K] and `factor_b`
[N, r] in place of `weight` [N, K]. The rank r is each module's own: it is that of its tensors.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.errors import ArtifactError

FACTORS = ("factor_a", "factor_b")


def config(ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a folder whose modules but `ignored` are factors."""
    return {"quant_method": "low_rank", "ignore": ignored}


def is_factored(values: dict[str, Any], module: str) -> bool:
    """Whether the checkpoint module `module` is stored as factors under such a config."""
    return module != "model.embed_tokens" and module not in values.get("ignore", ())


def read(values: Any, where: str) -> NoReturn:
    """Factors are no quantization: raises ArtifactError."""
    raise ArtifactError(
        f"{where}: the weights are stored as low-rank factors, which have no codes and scales",
        fix="start from the checkpoint they were made from",
    )


class LowRank(nn.Module):
    """y = x A^T B^T + b for each checkpoint module; the modules' A are one matrix, so that they take one product."""

    paper: ClassVar[str] = ""
    integers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.factor_a = nn.Parameter(torch.empty(0, in_features))
        self.factor_b = nn.ParameterList()
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        inner = F.linear(x, self.factor_a).split(self._ranks, -1)
        parts = [F.linear(part, up) for part, up in zip(inner, self.factor_b, strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Takes the factors of one or more checkpoint modules. Raises ArtifactError when their ranks differ."""
        for part in parts:
            if part["factor_a"].shape[0] != part["factor_b"].shape[1]:
                raise ArtifactError(
                    f"factor_a {list(part['factor_a'].shape)} and factor_b {list(part['factor_b'].shape)} have different ranks",
                    fix="download or write the checkpoint again",
                )
        trained = self.factor_a.requires_grad
        self.factor_a = nn.Parameter(torch.cat([part["factor_a"] for part in parts]), trained)
        self.factor_b = nn.ParameterList(nn.Parameter(part["factor_b"], trained) for part in parts)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.cat([part["bias"] for part in parts]), self.bias.requires_grad)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The factors of each module, and its bias."""
        assert rows == [len(one) for one in self.factor_b], f"{rows} are not the rows of the factors"
        downs, ups = self.factor_a.detach().split(self._ranks), self.factor_b
        found = [{"factor_a": down, "factor_b": up.detach()} for down, up in zip(downs, ups, strict=True)]
        if self.bias is not None:
            for part, bias in zip(found, self.bias.detach().split(rows), strict=True):
                part["bias"] = bias
        return found

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects, -1 for the rank of the module."""
        shapes: list[dict[str, tuple[int, ...]]] = [
            {"factor_a": (-1, self.in_features), "factor_b": (count, -1)} for count in rows
        ]
        if self.bias is not None:
            for shape, count in zip(shapes, rows, strict=True):
                shape["bias"] = (count,)
        return shapes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The product of the factors [N, K] in `dtype`."""
        downs = self.factor_a.split(self._ranks)
        return torch.cat([up.to(dtype) @ down.to(dtype) for up, down in zip(self.factor_b, downs, strict=True)])

    @property
    def _ranks(self) -> list[int]:
        """The rank of each module."""
        return [up.shape[1] for up in self.factor_b]
