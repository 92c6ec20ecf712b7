"""What a soft prompt can begin as: token ids of a text, rows of the vocabulary, and a text's keys and values, read from a model's files."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.adapters.prompts.attend import Recording
from hone.model.tokenizer import load_tokenizer
from hone.model.weights.model import ModelSource
from hone.model.weights.tensors import TABLES


class FirstValues:
    """First values from the model of `source`, which has no adapter; `seed` draws."""

    def __init__(self, source: ModelSource, seed: int) -> None:
        self.source, self.seed = source, seed

    def drawn(self, count: int) -> Tensor:
        """`count` token ids int64 of the vocabulary, with equal chances."""
        draw = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.source.config.vocab_size, (count,), generator=draw)

    def tokens(self, text: str, count: int) -> Tensor:
        """`count` token ids int64 of `text` by the model's tokenizer: its first ones, or all of them again and again.

        Raises SpecError for a text without tokens, ArtifactError for a folder without a tokenizer.
        """
        ids = load_tokenizer(self.source.folder).encode(text)
        if not ids:
            raise SpecError("adapter.init_text has no tokens", fix="give a text such as an instruction of the task")
        return torch.tensor((ids * -(-count // len(ids)))[:count])

    def rows(self, ids: Tensor) -> Tensor:
        """The embeddings of the tokens `ids` int64 [n], float32 [n, D]. Raises SpecError where the embedding is not stored as floats."""
        name = f"{TABLES['embed_tokens']}.weight"
        stored = self.source.tensor(name) if name in self.source.names() else None
        if stored is None or not stored.is_floating_point():
            raise SpecError(
                "the model's embedding is quantized, and init reads rows of it", fix="set adapter.init: random"
            )
        return stored[ids].float()

    @torch.no_grad()
    def keys_and_values(self, ids: Tensor, device: torch.device | str) -> Tensor:
        """The keys, rotated, and values of the tokens `ids` int64 [n] in every layer, float32 [n, 2 L KV Dh]; one layer is in memory."""
        source = self.source
        x, found = source.build_ends(device, torch.float32).embed(ids[None].to(device)), []
        context = Recording(ids[None].to(device))
        for index in range(source.config.num_layers):
            layer = source.build_layer(index, device, torch.float32)
            source.config.layers[index].mixer.prepare(context, x)
            x = layer(x, context)
            found += [one.flatten(2) for one in context.kept.pop(index)]
            source.close()
        return torch.cat(found, -1)[0].float()
