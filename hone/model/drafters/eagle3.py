"""EAGLE-3 head: one decoder layer that guesses token after token from a model's hidden states and its own.

Legend: D the head's width, E the model's, V its tokens, W those that the head guesses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.model.block import Placement
from hone.model.config import ModelConfig
from hone.model.context import Context
from hone.model.decoder import Decoder, draw_initial
from hone.model.drafters.eagle3_config import Eagle3Config, to_values
from hone.model.folder import CONFIG, read_json
from hone.model.linear import Dense, make_dense
from hone.model.linear_spec import INIT_STD, LinearSpec
from hone.model.norm import rms_norm_of
from hone.model.shards import Shards, write_json


class Eagle3Head(nn.Module):
    """g = layer([norm(embedding of the next token); norm(h)]), logits = lm_head(norm(g)). Li et al. 2025, arXiv:2503.01840.

    h [..., D] is `fuse` of the model's hidden states, or the g of the place before, where the model's are not known yet.
    """

    kind = "eagle3"
    draft_ids: Tensor
    """int64 [W] The model's token of each of the head's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer, width, eps = config.layer, config.hidden_size, config.norm_eps

        def make(name: str, spec: LinearSpec) -> nn.Module:
            return make_dense(name, replace(spec, in_features=2 * width) if spec.name == "qkv" else spec)

        self.fc = Dense(len(config.taps) * config.target_hidden_size, width, False)
        self.input_layernorm = rms_norm_of(width, eps)
        self.hidden_norm = rms_norm_of(width, eps)
        self.mixer = layer.mixer.build(Placement(width, 0, "midlayer.mixer", eps, make))
        self.post_attention_layernorm = rms_norm_of(width, eps)
        self.feed_forward = layer.feed_forward.build(Placement(width, 0, "midlayer.feed_forward", eps, make))
        self.norm = rms_norm_of(width, eps)
        self.lm_head = Dense(width, config.draft_vocab_size, False)
        self.embed_tokens: nn.Embedding | None = None
        """An embedding of its own; None: the model's."""
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def fuse(self, taps: dict[int, Tensor | None]) -> Tensor:
        """h [..., D] of the model's hidden states [..., E] after the layers `config.taps`."""
        found = [taps[layer] for layer in self.config.taps]
        return self.fc(torch.cat([one for one in found if one is not None], -1))

    def embed(self, tokens: Tensor, model: Decoder) -> Tensor:
        """[..., D] of the model's tokens [...]."""
        found = self.embed_tokens(tokens) if self.embed_tokens is not None else model.embed_tokens(tokens)
        return found.to(self.fc.weight.dtype)

    def forward(self, embedded: Tensor, h: Tensor, context: Context) -> Tensor:
        """g [..., D] for the embeddings of the next tokens and h, both [..., D]."""
        return self.states(embedded, h, context)[1]

    def states(self, embedded: Tensor, h: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """(what `lm_head` reads, g): the norms add in their own passes over memory."""
        normed = self.hidden_norm(h)
        rest = normed if self.config.norm_before_residual else h
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        normed, x = self.post_attention_layernorm.after_sum(self.mixer(both, context), rest)
        return self.norm.after_sum(self.feed_forward(normed, context), x)

    def prepare(self, x: Tensor, context: Context) -> None:
        """As `Decoder.prepare`."""
        self.config.layer.mixer.prepare(context, x)

    def logits(self, g: Tensor) -> Tensor:
        """[..., W] over the head's own tokens."""
        return self.lm_head(self.norm(g))

    def linears(self) -> list[tuple[Any, list[str], list[int]]]:
        """Its fused linears, each with the names of its pieces in checkpoints and their rows."""
        mixer, inner = self.config.layer.mixer, self.config.layer.feed_forward.intermediate_size
        q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        width = self.config.hidden_size
        return [
            (self.mixer.qkv, [f"self_attn.{one}_proj" for one in "qkv"], [q, kv, kv]),
            (self.mixer.out, ["self_attn.o_proj"], [width]),
            (self.feed_forward.gate_up, ["mlp.gate_proj", "mlp.up_proj"], [inner, inner]),
            (self.feed_forward.down, ["mlp.down_proj"], [width]),
        ]

    def plain(self) -> dict[str, nn.Module]:
        """Its other modules with a weight, by their names in checkpoints."""
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        found: dict[str, nn.Module] = {f"midlayer.{name}": getattr(self, name) for name in names}
        return {"fc": self.fc, **found, "norm": self.norm, "lm_head": self.lm_head}


def begin(model: Decoder, config: Eagle3Config, draft_ids: Tensor, seed: int) -> Eagle3Head:
    """A new head for `model`, float32 on its device: at first h is the model's deepest tapped state and `lm_head` the model's rows.

    The layer is drawn as a model's layers are, by (seed, name); its two projections into the residual stream begin near zero, so that
    a training starts from what the model's own head says of that state.
    """
    head = Eagle3Head(config)
    head.draft_ids = draft_ids.clone()
    width = config.hidden_size
    with torch.no_grad():
        for linear, names, rows in head.linears():
            for name, view in zip(names, linear.weight.split(rows), strict=True):
                shrunk = name.endswith(("o_proj", "down_proj"))
                draw_initial(view, f"{seed}/eagle3.{name}", (0.0, INIT_STD / (10 if shrunk else 1)))
        draw_initial(head.fc.weight, f"{seed}/eagle3.fc", (0.0, INIT_STD / 10))
        if width == config.target_hidden_size:
            head.fc.weight[:, -width:] += torch.eye(width)
        for name, module in head.plain().items():
            if name.endswith("norm"):
                module.weight.fill_(1.0)
        ids = draft_ids.to(model.device)
        if width == config.target_hidden_size:
            head.norm.weight.copy_(model.norm.weight.detach().float() + model.config.norm_offset)
            head.lm_head.weight.copy_(model.head_weight.detach()[ids])
        else:
            draw_initial(head.lm_head.weight, f"{seed}/eagle3.lm_head", (0.0, INIT_STD))
    return head.float().to(model.device)


def save(head: Eagle3Head, model: ModelConfig, folder: Path, base: str, dtype: torch.dtype) -> None:
    """Writes model.safetensors in `dtype` and config.json, with the names of SpecForge's folders, which vLLM and SGLang load."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.weight": module.weight for name, module in head.plain().items()}
    for linear, names, rows in head.linears():
        for name, view in zip(names, linear.weight.split(rows), strict=True):
            tensors[f"midlayer.{name}.weight"] = view
    stored = {name: one.detach().to("cpu", dtype).contiguous() for name, one in tensors.items()}
    ids = head.draft_ids.cpu()
    t2d = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    stored |= {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / CONFIG, to_values(head.config, model, base, str(dtype).removeprefix("torch.")))


def load(folder: Path, num_layers: int, device: torch.device | str, dtype: torch.dtype) -> Eagle3Head:
    """The head in `folder`, of SpecForge's names (`midlayer.*`) or speculators' (`layers.0.*`), for a model of `num_layers`.

    Raises ArtifactError for a missing or corrupt tensor, SpecError for a config that hone cannot run.
    """
    config = Eagle3Config.of(read_json(folder / CONFIG), str(folder / CONFIG), num_layers)
    with torch.device("meta"):
        head = Eagle3Head(config)
    stored = Shards(folder)
    names = set(stored.names())

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        found = next((one for one in _names(name) if one in names), name)
        tensor = stored.tensor(found)
        if tuple(tensor.shape) != shape:
            raise ArtifactError(
                f"{stored.file(found)}: {found} is {list(tensor.shape)}, config.json says {list(shape)}",
                fix="give a head and the config.json of one training",
            )
        return tensor.to(device, dtype)

    for name, module in head.plain().items():
        module.weight = nn.Parameter(read(f"{name}.weight", tuple(module.weight.shape)))
    for linear, pieces, rows in head.linears():
        width = linear.weight.shape[1]
        parts = [read(f"midlayer.{name}.weight", (count, width)) for name, count in zip(pieces, rows, strict=True)]
        linear.weight = nn.Parameter(torch.cat(parts))
    if "embed_tokens.weight" in names:
        table = read("embed_tokens.weight", (config.vocab_size, config.hidden_size))
        head.embed_tokens = nn.Embedding.from_pretrained(table)
    head.draft_ids = _draft_ids(stored, names, config).to(device)
    return head.eval().requires_grad_(False)


def _names(name: str) -> tuple[str, ...]:
    return (name, name.replace("midlayer.", "layers.0."), f"model.{name}")


def _draft_ids(stored: Shards, names: set[str], config: Eagle3Config) -> Tensor:
    """int64 [W]: the model's token of each of the head's, whose offsets are stored."""
    ids = torch.arange(config.draft_vocab_size)
    if "d2t" in names:
        offsets = stored.tensor("d2t").long()
        if offsets.shape != ids.shape:
            raise ArtifactError(
                f"{stored.file('d2t')}: d2t has {len(offsets)} entries, draft_vocab_size is {len(ids)}",
                fix="give a head and the config.json of one training",
            )
        ids = ids + offsets
    elif config.draft_vocab_size != config.vocab_size:
        raise ArtifactError(
            f"{stored.folder} guesses {config.draft_vocab_size} of {config.vocab_size} tokens, and has no d2t that says which",
            fix="copy d2t from the head's original folder",
        )
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
        raise ArtifactError(
            f"{stored.folder}: d2t names tokens outside the model's {config.vocab_size}", fix="download the head again"
        )
    return ids
