"""Importances against naive loops over transformers' model, sequence by sequence and token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from hone.base.errors import ArtifactError
from hone.base.run import Run
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.compress.structured.importance import added_losses, block_influence, width_scores
from hone.model.hf import Checkpoint
from tests.compress.structured.test_expert_families import FAMILIES

QUIET = Run(quiet=True)
LENGTHS = [17, 24, 9]


def packed() -> tuple[Calibration, list[torch.Tensor]]:
    """Three documents, the last two with padding after them, and the same tokens one by one."""
    draw = np.random.default_rng(3)
    tokens, ids = np.zeros((3, 24), np.int64), np.full((3, 24), -1, np.int32)
    alone = []
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = draw.integers(1, 300, length)
        ids[row, :length] = 0
        alone.append(torch.from_numpy(tokens[row : row + 1, :length].copy()))
    return Calibration(tokens, ids, {}), alone


@pytest.fixture(scope="module")
def peer(tiny_llama: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def flow(batch_size: int = 2) -> Flow:
    return Flow(packed()[0], batch_size, "cpu", torch.float32)


def test_block_influence_is_one_minus_the_mean_cosine(tiny_llama: Path, peer) -> None:
    found = block_influence(Checkpoint(tiny_llama), flow(), QUIET)
    cosines: list[list[float]] = [[], []]
    inputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(peer.model.layers):
        layer.register_forward_hook(lambda _, args, out, index=index: inputs.update({index: (args[0], out)}))
    with torch.no_grad():
        for tokens in packed()[1]:
            peer(tokens, use_cache=False)
            for index, (before, after) in inputs.items():
                after = after[0] if isinstance(after, tuple) else after
                for x, y in zip(before.reshape(-1, 64), after.reshape(-1, 64)):
                    cosines[index].append(float(x @ y / (x.norm() * y.norm())))
    expected = [1 - sum(one) / len(one) for one in cosines]
    assert found == pytest.approx(expected, abs=1e-5) and len(cosines[0]) == sum(LENGTHS)


def test_added_losses_are_those_of_models_without_one_layer(tiny_llama: Path) -> None:
    found = added_losses(Checkpoint(tiny_llama), flow(), QUIET)

    def loss(kept: list[int]) -> float:
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
        model.model.layers = torch.nn.ModuleList(model.model.layers[index] for index in kept)
        model.config.num_hidden_layers = len(kept)
        losses = []
        with torch.no_grad():
            for tokens in packed()[1]:
                logits = model(tokens, use_cache=False).logits[0, :-1]
                losses += F.cross_entropy(logits, tokens[0, 1:], reduction="none").tolist()
        return sum(losses) / len(losses)

    whole = loss([0, 1])
    assert found == pytest.approx([loss([1]) - whole, loss([0]) - whole], abs=1e-5)


def test_widths_are_the_norm_over_sequences_of_means_over_tokens(tiny_llama: Path, peer) -> None:
    found = width_scores(Checkpoint(tiny_llama), flow(), QUIET)
    seen: dict[str, torch.Tensor] = {}
    names = {f"{index}.{path}": layer.get_submodule(path) for index, layer in enumerate(peer.model.layers)
             for path in ("self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj", "mlp.up_proj")}  # fmt: skip
    names["norm"] = peer.lm_head
    for name, module in names.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0][0]}))
    squares: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for tokens in packed()[1]:
            peer(tokens, use_cache=False)
            for name, x in seen.items():
                if name.endswith("o_proj"):
                    x = torch.stack([x[:, 16 * head : 16 * head + 16].norm(dim=1) for head in range(4)], 1)
                squares[name] = squares.get(name, 0) + x.abs().mean(0) ** 2
    scores = {name: square.sqrt() for name, square in squares.items()}
    hidden = scores.pop("norm")
    for index in range(2):
        heads = scores[f"{index}.self_attn.o_proj"]
        assert torch.allclose(found.kv_heads[index], heads[0::2] + heads[1::2], rtol=1e-4)
        assert torch.allclose(found.intermediate[index], scores[f"{index}.mlp.down_proj"], rtol=1e-4)
        hidden = hidden + scores[f"{index}.self_attn.q_proj"] + scores[f"{index}.mlp.up_proj"]
    assert torch.allclose(found.hidden, hidden, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_hidden_channels_before_experts_are_measured_as_those_before_dense_layers(family: str, family_folder) -> None:
    options = FAMILIES[family]
    folder = family_folder(family, **options)
    found = width_scores(Checkpoint(folder), flow(), QUIET)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}
    read = [
        module for layer in peer.model.layers for module in (layer.self_attn.q_proj, layer.post_attention_layernorm)
    ]
    for place, module in enumerate([*read, peer.lm_head]):

        def keep(module, args, out, place=place) -> None:
            seen[place] = (args[0] if isinstance(module, torch.nn.Linear) else out)[0]

        module.register_forward_hook(keep)
    squares = torch.zeros(2 * 2 + 1, 64)
    with torch.no_grad():
        for tokens in packed()[1]:
            peer(tokens, use_cache=False)
            squares += torch.stack([seen[place].abs().mean(0) for place in range(5)]) ** 2
    assert torch.allclose(found.hidden, squares.sqrt().sum(0), rtol=1e-4)


@pytest.mark.parametrize("measure", [block_influence, added_losses, width_scores])
def test_batches_change_nothing_and_what_is_not_finite_is_said(measure, tiny_llama: Path) -> None:
    first, second = (measure(Checkpoint(tiny_llama), flow(size), QUIET) for size in (1, 3))
    one, other = (found.hidden.tolist() if measure is width_scores else found for found in (first, second))
    assert one == pytest.approx(other, rel=1e-4)
    broken = Checkpoint(tiny_llama)
    build = broken.build_ends

    def infinite(*options):
        ends = build(*options)
        ends.embedding.data[:] = float("inf")
        return ends

    broken.build_ends = infinite
    with pytest.raises(ArtifactError, match="not all finite in float32"):
        measure(broken, flow(), QUIET)
