"""Models whose feed-forwards are `moe`: what their routers do in a pass that measures, and which of them experts can leave."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.compress.stage import Compress
from hone.compress.structured.importance import expert_scores
from hone.compress.targets import linears
from hone.measure.machine import describe
from hone.model.config import ModelConfig
from hone.model.decoder import build
from hone.model.facts import CheckpointFacts
from hone.model.hf import Checkpoint, save
from hone.model.quantized.packed_int import PackedInt
from hone.model.routers.hash import mixed
from hone.model.shape import Shape
from tests.compress.conftest import must_serve_what_it_computes

NUM_EXPERTS = 8
OWNERS = np.where(np.arange(20) < 13, 0, -1).astype(np.int32)[None].repeat(4, 0)
PADDED = Calibration(np.arange(80).reshape(4, 20) * 7 % 60, OWNERS, {})


def folder(path: Path, **moe: Any) -> Path:
    block = {"kind": "moe", "num_experts": NUM_EXPERTS, "intermediate_size": 16} | moe
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        save(build(Shape(**sizes, max_seq_len=64, feed_forward=(block,)).config(60), seed=1), path)
    return path


def test_a_capacity_drops_nothing_of_what_is_measured(tmp_path: Path) -> None:
    source = Checkpoint(folder(tmp_path, capacity_factor=0.25, balance=["aux_loss"]))
    [counts] = expert_scores(source, Flow(PADDED, 2, "cpu", torch.float32), Run(quiet=True), weighted=False)
    assert sum(counts) == 2 * PADDED.num_tokens
    assert all(context.measures for _, context, _ in Flow(PADDED, 2, "cpu", torch.float32).batches())


@torch.no_grad()
def test_a_router_by_token_ids_is_given_them(tmp_path: Path) -> None:
    source = Checkpoint(folder(tmp_path, router="hash")).with_each_expert()
    flow = Flow(PADDED, 2, "cpu", torch.float32)
    flow.embed(source.build_ends())
    readers = {one.reads: [one.path] for one in linears(source.config, 0)}
    found = flow.statistics(source.build_layer(0), readers, {"meansquare"})
    chosen = mixed(torch.from_numpy(PADDED.tokens[OWNERS >= 0]), 0) % NUM_EXPERTS
    tokens = [int(found[f"feed_forward.down.{expert}"]["tokens"]) for expert in range(NUM_EXPERTS)]
    assert tokens == chosen.bincount(minlength=NUM_EXPERTS).tolist()


def planned(path: Path, text: Path, **moe: Any) -> ModelConfig:
    spec = Compress.read({"steps": [{"kind": "experts", "num_experts": 6}], "calibration_text": str(text)})
    return spec.plan({"model": CheckpointFacts.of(folder(path, **moe))}, describe()).facts.config


@pytest.mark.parametrize(
    ("moe", "said"),
    [
        ({"router": {"kind": "softmax", "num_groups": 2}}, "chooses among 2 groups of neighbours"),
        ({"balance": [{"kind": "device_loss", "devices": 4}]}, "devices 4 does not divide 6 experts"),
    ],
)
def test_experts_whose_neighbours_count_do_not_leave(
    moe: Any, said: str, tmp_path: Path, calibration_text: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        planned(tmp_path, calibration_text, **moe)


@torch.no_grad()
def test_a_router_has_the_statistics_of_what_its_block_reads(tmp_path: Path) -> None:
    flow = Flow(PADDED, 2, "cpu", torch.float32)
    source = Checkpoint(folder(tmp_path)).with_each_expert()
    flow.embed(source.build_ends())
    layer, read = source.build_layer(0), list[torch.Tensor]()
    hook = layer.feed_forward.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    for piece, context, _ in flow.batches():
        layer(flow.states[piece], context)
    hook.remove()
    rows = torch.cat(read).flatten(0, 1)[torch.from_numpy(OWNERS).flatten() >= 0]
    routers = {one.reads: [one.path] for one in linears(source.config, 0) if one.path == "feed_forward.router"}
    found = flow.statistics(layer, routers, {"meansquare"})["feed_forward.router"]
    torch.testing.assert_close(found["meansquare"].float(), rows.square().mean(0), atol=1e-6, rtol=1e-4)


def test_a_named_router_is_quantized_by_what_it_reads_and_served(
    family_folder, calibration_text: Path, compress
) -> None:
    whole, name = family_folder("mixtral", num_local_experts=4, num_experts_per_tok=2), "block_sparse_moe.gate"
    codes = []
    for kind in ("rtn", "gptq"):
        options = {"targets": [r"\.gate$"], "calibration_text": str(calibration_text), "name": kind}
        made = Checkpoint(compress(whole, {"kind": kind, "group_size": 16}, **options).folder)
        assert {type(layer.feed_forward.router) for layer in made.build().layers} == {PackedInt}
        must_serve_what_it_computes(made.folder)
        codes.append(made.tensor(f"model.layers.0.{name}.weight_packed"))
    assert codes[0].shape == codes[1].shape and not torch.equal(*codes)
