"""Whole experts of several ranks, computed one rank after another: their sum is the layer's output, whichever way its visits are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.model import hf
from hone.model.context import Causal, Context
from hone.model.feed_forwards import moe_fused
from hone.model.feed_forwards.moe import MoELayer
from hone.model.linear import ExpertLinears
from hone.model.parallel import experts
from hone.model.parallel.experts import HeldRoutes, PlacedMoELayer, even_slots
from hone.model.parallel.reading import LocalCheckpoint
from hone.parallel.group import Group
from hone.parallel.place import Place
from hone.serve.paging.paged import PagedBuffers
from tests.model.parallel.quantized_folder import write_quantized
from tests.model.parallel.test_reading import SCHEMES
from tests.model.test_moe import fused_on_a_cpu
from tests.serve.small import decoder

FED = {
    "kind": "moe",
    "num_experts": 6,
    "intermediate_size": 24,
    "num_shared_experts": 1,
    "router": {"kind": "softmax", "top_k": 3},
}
VARIANTS = {
    "plain": {},
    "biased": {"biases": True, "swiglu_limit": 7.0},
    "sigmoid": {"router": {"kind": "sigmoid", "top_k": 2}},
    "grouped": {"router": {"kind": "sigmoid", "top_k": 2, "num_groups": 2, "top_groups": 1}},
}


@pytest.mark.parametrize("redundant", [0, 3])
@pytest.mark.parametrize("way", ["cut", "in graphs", "kernels"])
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_sum_to_the_layer(tmp_path: Path, monkeypatch, name: str, way: str, redundant: int) -> None:
    called = fused_on_a_cpu(monkeypatch) if way == "kernels" else []
    if way == "in graphs":  # no count is read
        monkeypatch.setattr(
            experts, "HeldRoutes", lambda *given, **options: HeldRoutes(*given, **{**options, "cuts": False})
        )
    model = decoder(
        num_layers=1, num_heads=3, num_kv_heads=3, hidden_size=48, feed_forward=({**FED, **VARIANTS[name]},)
    )
    with torch.no_grad():
        for path, one in model.named_parameters():
            if one.dim() == 3 or path.endswith("bias"):
                one.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(path)))
    hf.save(model, tmp_path)
    slots, parts = even_slots(model.config, 3, redundant), []
    for rank in range(3):
        place = Place(rank, 3, 0, 1)
        part = LocalCheckpoint(tmp_path, place, Group(place), slots=slots).build().layers[0].feed_forward
        assert isinstance(part, PlacedMoELayer)
        part._forward_hooks.clear()  # the sum over ranks, which is made here
        part.count()
        parts.append(part)
    tokens = torch.arange(1, 41) % 61
    context, x = Causal(tokens), torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
    context.tokens = tokens
    with torch.no_grad():
        made = [one(x, context) for one in parts]
        monkeypatch.setattr(moe_fused, "_on_gpu", lambda tokens: False)
        wanted = model.layers[0].feed_forward(x, context)
    torch.testing.assert_close(sum(made), wanted, atol=1e-5, rtol=1e-5)
    assert all(float(one.abs().max()) > 0.01 for one in made)
    if way == "kernels" and name != "biased":
        assert called.count("expert_swiglu") == 3
        assert called.count("choose_experts") == (0 if name == "grouped" else 3), "a choice is of this rank's slots"
    counts = [one.counts.tolist() for one in parts]
    assert (
        counts[0] == counts[1] == counts[2] and sum(counts[0]) == 40 * model.config.layers[0].feed_forward.router.top_k
    )


def test_a_captured_pass_derives_the_key_of_copies_anew(tmp_path: Path) -> None:
    """A graph must compute it of the buffers that its replays fill, not read what the pass before the capture left."""
    model = decoder(num_layers=1, feed_forward=(FED,))
    hf.save(model, tmp_path)
    place, slots = Place(0, 2, 0, 1), even_slots(model.config, 2, 2)
    layer = LocalCheckpoint(tmp_path, place, Group(place), slots=slots).build().layers[0].feed_forward
    buffers = PagedBuffers.__new__(PagedBuffers)  # the buffers themselves need a GPU
    Context.__init__(buffers)
    buffers.tokens, buffers.positions, buffers._pages = torch.arange(12).view(3, 4)
    first = layer.local(buffers).key
    assert layer.local(buffers).key is first, "all layers of a pass share it"
    buffers.forget()
    again = layer.local(buffers).key
    assert again is not first and torch.equal(again, buffers.positions + buffers.tokens)


@pytest.mark.parametrize("name", ["int4 in groups", "fp8 blocks"])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_stack_the_codes_of_their_experts(tmp_path: Path, monkeypatch, name: str, whole_experts: bool) -> None:
    """As one process does: else they would be computed one expert after another, outside of CUDA graphs."""
    fed = {"kind": "moe", "intermediate_size": 64, "num_experts": 4, "router": {"kind": "softmax", "top_k": 2}}
    model = decoder(hidden_size=128, num_layers=1, family="mixtral", feed_forward=(fed,), tie_embeddings=False)
    folder = write_quantized(model, tmp_path / "model", *SCHEMES[name])
    slots = even_slots(model.config, 2, 2) if whole_experts else None
    place = Place(1, 2, 0, 1)

    def built() -> MoELayer:
        return LocalCheckpoint(folder, place, Group(place), slots=slots).build().layers[0].feed_forward

    apart = built()
    monkeypatch.setattr(ExpertLinears, "stacks_on", lambda self, device: self[0].stacks)
    stacked = built()
    for path in ("gate_up", "down"):
        one = getattr(stacked, path)
        assert getattr(apart, path).stacked is None and one.at_once().sizes[0] == (3 if whole_experts else 4)
        wanted = getattr(apart, path).dequantize(torch.float32)
        torch.testing.assert_close(one.at_once().dequantize(torch.float32), wanted, rtol=1e-6, atol=0)
