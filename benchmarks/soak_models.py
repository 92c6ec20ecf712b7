"""What `benchmarks.soak` serves: tiny random models, and the fields of the engine that a kind of soak is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"lora": {"max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 4, "allow_runtime_lora_updating": True}},
    "guesses": {"drafter": {"kind": "prompt_lookup", "min_ngram": 1}, "eviction": {"kind": "slru"}},
    "fewer_bits": {"kv_cache_dtype": "int8", "eviction": {"kind": "priority_duration"}},
    "experts": {"kv_cache_dtype": "fp8", "eviction": {"kind": "lfu"}},
}
"""Fields of the engine. `adapters`: three adapters, of which two fit host memory and a step, and others that come and go;
`fewer_bits`: weights of 4 bits; `experts`: their experts too."""
ADAPTERS = ("a", "b", "c")
"""Adapters that the server of the kind `adapters` has from the start."""


def make_model(folder: Path, kind: str = "plain") -> Path:
    """A random two-layer model with a tokenizer of bytes and a chat template, in the form that `kind` serves.

    Adapters of the kind `adapters` are written beside it, in folders of their names.
    """
    import tokenizers
    import torch

    from benchmarks.serve_adapters import adapter_in
    from hone.model import hf
    from hone.model.decoder import build
    from hone.model.shape import Shape

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(tokenizers.models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.add_special_tokens(["<|end|>"])
    experts = ({"kind": "moe", "num_experts": 8, "intermediate_size": 64},)
    shape = Shape(
        # Heads of 32, which compiled steps of a CPU take.
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=160, max_seq_len=512,
        **({"family": "qwen3_moe", "feed_forward": experts} if kind == "experts" else {}),
    )  # fmt: skip
    model = build(shape.config(words.get_vocab_size(), None, len(letters)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.15)  # wide enough that greedy text is not constant
    dense = folder.with_name(f"{folder.name}-dense") if kind in ("fewer_bits", "experts") else folder
    hf.save(model, dense)
    words.save(str(dense / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (dense / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf8")
    if dense != folder:
        _compress(dense, folder)
    for name in ADAPTERS if kind == "adapters" else ():
        adapter_in(folder.parent / name, folder, 4)
    return folder


def engine_fields(kind: str, folder: Path) -> dict[str, Any]:
    """KINDS[kind] for the model in `folder`."""
    fields = KINDS[kind]
    if kind != "adapters":
        return fields
    modules = [f"{name}={folder.parent / name}" for name in ADAPTERS]
    return {**fields, "lora": {**fields["lora"], "lora_modules": modules}}


def _compress(dense: Path, folder: Path) -> None:
    """The model with weights of 4 bits in groups of 32."""
    from hone.base.artifact import Artifact
    from hone.base.run import Run
    from hone.compress.stage import Compress

    spec = Compress.read({"steps": [{"kind": "rtn", "bits": 4, "group_size": 32}]})
    spec.make(folder, {"model": Artifact.read(dense)}, Run(quiet=True))
