"""Weights are made, read and written a part of the model at a time: no rank has all of them at once."""

from __future__ import annotations

import pytest
import torch

from hone.model.decoder import build
from hone.model.hf import load
from tests.train.conftest import SHAPE
from tests.train.data_parallel.alive_ranks import FILE_BYTES, most_alive
from tests.train.data_parallel.test_data_parallel import on_ranks

KINDS = [
    {"data_parallel": "zero3"},
    {"tensor_parallel_degree": 2},
    {"tensor_parallel_degree": 2, "enable_sequence_parallel": False},
    {"pipeline_parallel_degree": 2},
]
VOCAB = 256


@pytest.fixture(scope="module")
def config():
    """Of a model with many layers, small embeddings, and float32 weights of 1.4 MB."""
    return SHAPE.model_copy(update={"num_layers": 16}).config(VOCAB)


@pytest.fixture(scope="module")
def counted(config, data_folder, tmp_path_factory):
    """(folder of the written models, what each rank counted for each kind)."""
    out = tmp_path_factory.mktemp("parts")
    return out, on_ranks(2, most_alive, KINDS, config.model_dump(mode="json"), str(data_folder), str(out))


def test_a_rank_has_its_slices_and_two_layers_at_most(config, counted):
    """One in float32 as it is made, one as it computes; embedding and head are whole with zero3. A twentieth is padding."""
    whole, ends = 4 * config.num_params, 4 * 2 * VOCAB * config.hidden_size
    layer = (whole - ends) / config.num_layers
    for rank, kinds in enumerate(counted[1]):
        for kind, found in zip(KINDS, kinds, strict=True):
            most = (found["kept"] + ends / 2 + 2 * layer) * 1.05
            assert most < 0.75 * whole
            assert found["kept"] < found["drawn"] <= most, kind
            assert found["kept"] < found["read"] <= most, kind
            held = FILE_BYTES + layer if rank == 0 else 0.0  # rank 0 alone holds what goes into a file
            assert 0 < found["written"] <= held + 3 * layer < 0.5 * whole, kind


def test_what_is_written_part_by_part_is_what_one_process_draws(config, counted):
    expected = build(config).state_dict()
    for number in range(len(KINDS)):
        written = load(counted[0] / str(number)).state_dict()
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], values) for name, values in expected.items()), KINDS[number]
        assert len(list((counted[0] / str(number)).glob("*.safetensors"))) > 10
