"""Turns a legacy llama2.c model (.bin and tokenizer.bin) into a Hugging Face folder; tests use the real stories260K.

Formats: github.com/karpathy/llama2.c, export.py `legacy_export` (7 int32, then float32 matrices layer by layer, kind by
kind) and tokenizer.py `export` (int32 longest token, then float32 score, int32 length and the bytes of each token).
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, normalizers, processors

BOS, EOS = 1, 2


def convert(model: Path, tokenizer: Path, folder: Path) -> Path:
    """Writes config.json, generation_config.json, model.safetensors and tokenizer files into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    convert_weights(model, folder)
    convert_tokenizer(tokenizer, folder)
    return folder


def convert_weights(model: Path, folder: Path) -> None:
    """The weights, with query and key rows reordered: llama2.c turns neighbours (2i, 2i+1), checkpoints halves (i, i + d/2)."""
    raw = model.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = struct.unpack("7i", raw[:28])
    shared, vocab = vocab > 0, abs(vocab)
    head_dim = dim // heads
    numbers = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=28).copy())
    place = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return numbers[place - count : place].view(*shape)

    def halves(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, head_dim // 2, 2, dim).transpose(1, 2).reshape(-1, dim)

    kv_dim = kv_heads * head_dim
    tensors = {"model.embed_tokens.weight": take(vocab, dim)}
    stacks = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, dim, dim),
        "self_attn.k_proj": take(layers, kv_dim, dim),
        "self_attn.v_proj": take(layers, kv_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    for name, stack in stacks.items():
        for layer, tensor in enumerate(stack):
            turned = name.endswith(("q_proj", "k_proj"))
            tensors[f"model.layers.{layer}.{name}.weight"] = halves(tensor) if turned else tensor
    tensors["model.norm.weight"] = take(dim)
    take(2, seq_len, head_dim // 2)  # cosines and sines, which everyone computes
    if not shared:
        tensors["lm_head.weight"] = take(vocab, dim)
    assert place == len(numbers), f"{len(numbers) - place} numbers left over"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shared,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))


def convert_tokenizer(path: Path, folder: Path) -> None:
    """tokenizer.json: sentencepiece's byte-pair encoding with byte fallback, its merges read off the scores."""
    pieces, scores = _read_pieces(path)
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for piece in sorted(pieces[259:], key=lambda piece: -scores[vocab[piece]]):
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        found = [split for split in splits if split[0] in vocab and split[1] in vocab]
        merges += sorted(found, key=lambda split: (vocab[split[0]], vocab[split[1]]))
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _read_pieces(path: Path) -> tuple[list[str], list[float]]:
    """The vocabulary in sentencepiece spelling (U+2581 for a space) and each piece's score."""
    raw = path.read_bytes()
    pieces, scores, place = [], [], 4
    while place < len(raw):
        score, length = struct.unpack_from("<fi", raw, place)
        piece = raw[place + 8 : place + 8 + length].decode("utf8")
        place += 8 + length
        piece = piece.strip("\n") if re.fullmatch(r"\n</?s>\n", piece) else piece.replace(" ", "\u2581")
        pieces.append(piece)
        scores.append(score)
    return pieces, scores
