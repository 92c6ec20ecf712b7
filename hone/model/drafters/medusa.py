"""Medusa heads: head k guesses the token k + 2 places after the last one known, from the model's last normed hidden state."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.drafters.folder import MEDUSA_WEIGHTS, medusa_sizes
from hone.model.folder import CONFIG, read_json
from hone.model.shards import write_json


class ResBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """`num_heads` heads of `num_layers` residual blocks and a linear [V, D] each. Cai et al. 2024, arXiv:2401.10774.

    Their parameters have the names of the paper's checkpoints: `k.0.linear.weight`, `k.0.linear.bias`, `k.1.weight`.
    """

    kind = "medusa"

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        for k in range(num_heads):
            blocks = [ResBlock(hidden_size) for _ in range(num_layers)]
            self.add_module(str(k), nn.Sequential(*blocks, nn.Linear(hidden_size, vocab_size, bias=False)))

    @property
    def heads(self) -> list[nn.Sequential]:
        """The heads in order."""
        return list(self.children())  # type: ignore[arg-type]

    def inputs(self, x: Tensor) -> list[Tensor]:
        """What the last linear of each head is multiplied with: [..., D] of normed hidden states x [..., D]."""
        return [head[:-1](x) for head in self.heads]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Logits [..., V] of each head for normed hidden states x [..., D] (`Decoder.head_input`)."""
        return [head(x) for head in self.heads]


def begin(model: Decoder, num_heads: int, num_layers: int) -> MedusaHeads:
    """New heads for `model`, float32 on its device: blocks change nothing and every last linear is the model's head, as in the paper."""
    heads = MedusaHeads(num_heads, num_layers, model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        for head in heads.heads:
            for block in head[:-1]:
                nn.init.zeros_(block.linear.weight)
                nn.init.zeros_(block.linear.bias)
            head[-1].weight.copy_(model.head_weight.detach()[: model.config.vocab_size])
    return heads.float().to(model.device)


def save(heads: MedusaHeads, config: ModelConfig, folder: Path, base: str, dtype: torch.dtype) -> None:
    """Writes `medusa_lm_head.safetensors` in `dtype` and the config.json that names `base`, the model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.detach().to("cpu", dtype).contiguous() for name, one in heads.state_dict().items()}
    save_file(tensors, folder / MEDUSA_WEIGHTS, metadata={"format": "pt"})
    write_json(
        folder / CONFIG,
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": len(heads.heads),
            "medusa_num_layers": heads.num_layers,
            "base_model_name_or_path": base,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
        },
    )


def load(folder: Path, device: torch.device | str, dtype: torch.dtype) -> MedusaHeads:
    """The heads in `folder`. Raises ArtifactError for a corrupt file, or tensors that are not those of its config.json."""
    sizes = medusa_sizes(folder, read_json(folder / CONFIG))
    with torch.device("meta"):
        heads = MedusaHeads(*sizes)
    path = folder / MEDUSA_WEIGHTS
    try:
        tensors = load_file(path)
    except Exception as error:
        raise ArtifactError(f"{path} is corrupt: {error}", fix="download or write the folder again") from None
    expected = {name: tuple(one.shape) for name, one in heads.state_dict().items()}
    found = {name: tuple(one.shape) for name, one in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))[0]
        raise ArtifactError(
            f"{path}: {wrong} is {found.get(wrong, 'missing')}, config.json says {expected.get(wrong, 'there is none')}",
            fix="give heads and config.json of one training",
        )
    placed = {name: one.to(device, dtype) for name, one in tensors.items()}
    heads.load_state_dict(placed, strict=True, assign=True)
    return heads.eval().requires_grad_(False)
