"""The peer of `benchmarks.finetune`: transformers + peft, Liger's kernels on a GPU, and bitsandbytes for the codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.train import SHAPES


def peer_step(
    args: argparse.Namespace, rank: int, *, codes: bool, recomputed: bool
) -> tuple[Callable[[], Tensor], str]:
    """(one step, which gives its loss; what it is called) at the sizes of `args`."""
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    sizes, vocab = SHAPES[args.shape]
    device, cuda, liger = args.device, args.device.startswith("cuda"), ""
    if cuda:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
        liger = " + Liger"
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size, num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_kv_heads, vocab_size=vocab,
        max_position_embeddings=sizes.max_seq_len, rope_theta=sizes.rope_theta, tie_word_embeddings=sizes.tie_embeddings,
    )  # fmt: skip
    dtype = torch.bfloat16 if cuda else torch.float32
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    if codes:
        model = _as_4bit(model, device)
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=recomputed, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    if recomputed and not codes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(0, vocab, (args.rows, args.seq_len), device=device)

    def step() -> Tensor:
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=cuda):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, f"peft{liger} {'QLoRA' if codes else 'LoRA'}"


def _as_4bit(model: Any, device: str) -> Any:
    """The transformers model with bitsandbytes' NF4 linears, quantized from its weights, as `load_in_4bit` would make it."""
    import bitsandbytes

    dtype = next(model.parameters()).dtype
    for layer in model.model.layers:
        for holder in (layer.self_attn, layer.mlp):
            for name, linear in list(holder.named_children()):
                if not isinstance(linear, torch.nn.Linear):
                    continue
                options = {"compute_dtype": dtype, "compress_statistics": True, "quant_type": "nf4"}
                made = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, **options)
                weight = linear.weight.detach().to("cpu")
                made.weight = bitsandbytes.nn.Params4bit(
                    weight, requires_grad=False, compress_statistics=True, quant_type="nf4"
                )
                setattr(holder, name, made.to(device))
    model.is_loaded_in_4bit = True
    return model
