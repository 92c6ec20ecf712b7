"""Bad inputs of a training on two ranks: each is one error, the same on both, that names the field and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from hone.base.errors import MachineError
from hone.base.ranks import Mesh
from hone.cli.dispatch import main
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.faults.fault_ranks import early, refused

SPEC: dict[str, Any] = {
    "model": SHAPE.model_dump(), "batch_size": 8, "seq_len": 32, "steps": 2, "validation": {"sequences": 4},
}  # fmt: skip
PIPELINE = {"pipeline_parallel_degree": 2}

TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    # what is wrong, the fields, the first line of the error, a part of the way out
    ("a layout that does not divide", {"parallelism": {"tensor_parallel_degree": 3}},
     "tensor_parallel_degree 3 does not divide 2 ranks", "parallelism.tensor_parallel_degree"),
    ("copies that do not divide", {"parallelism": {"data_parallel": {"kind": "zero3", "data_parallel_replicate_degree": 3}}},
     "data_parallel_replicate_degree 3 does not divide 2 ranks", "parallelism.data_parallel.data_parallel_replicate_degree"),
    ("heads", {"model": {**SPEC["model"], "num_heads": 3, "num_kv_heads": 3, "head_dim": 16}, "parallelism": {"tensor_parallel_degree": 2}},
     "layer 0: attention.num_heads 3 cannot be divided among 2 tensor-parallel ranks", "parallelism.tensor_parallel_degree"),
    ("heads of keys", {"model": {**SPEC["model"], "num_kv_heads": 1}, "parallelism": {"tensor_parallel_degree": 2}},
     "layers.0.mixer.qkv.k has 1 heads, fewer than 2 tensor-parallel ranks", "parallelism.tensor_parallel_degree"),
    ("a sequence for tensor parallelism", {"seq_len": 31, "parallelism": {"tensor_parallel_degree": 2}},
     "seq_len 31 is not divisible by tensor_parallel_degree 2", "seq_len"),
    ("a sequence for context parallelism", {"seq_len": 30, "parallelism": {"context_parallel_degree": 2}},
     "a sequence of 30 tokens is not divisible into 4 chunks for 2 context-parallel ranks", "set seq_len to a multiple of 4"),
    ("heads for ulysses", {"model": {**SPEC["model"], "num_heads": 3, "num_kv_heads": 1, "head_dim": 16},
      "parallelism": {"context_parallel_degree": 2, "context_parallel": "ulysses"}},
     "ulysses cannot divide 3 query heads among 2 context-parallel ranks", "context_parallel_degree"),
    ("fewer layers than stages", {"model": {**SPEC["model"], "num_layers": 1}, "gradient_accumulation_steps": 2, "parallelism": PIPELINE},
     "1 layer makes no 2 pipeline stages", "parallelism.pipeline_parallel_degree"),
    ("too few micro-batches", {"parallelism": {**PIPELINE, "pipeline_parallel_schedule": "dualpipe"}},
     "pipeline_parallel_schedule dualpipe: DualPipe of 1 microbatches over 2 ranks", "gradient_accumulation_steps"),
    ("a batch for the ranks", {"batch_size": 3},
     "batch_size 3 is not divisible into 2 ranks x 1 micro-batches", "set batch_size to a multiple of 2"),
    ("more ranks than sequences", {"batch_size": 1},
     "batch_size 1 is not divisible into 2 ranks x 1 micro-batches", "set batch_size to a multiple of 2"),
    ("a technique of one rank", {"parallelism": {"offload": "host"}},
     "offload host on 2 ranks would keep 2 copies of the whole state on the host", "parallelism.data_parallel"),
    ("an unknown schedule", {"parallelism": {**PIPELINE, "pipeline_parallel_schedule": "1f1c"}},
     "unknown pipeline schedule '1f1c'", "did you mean '1f1b'?"),
    ("an unknown technique", {"parallelism": {"data_parallel": "zero5"}},
     "unknown data parallelism 'zero5'", "did you mean 'zero3'?"),
    ("zero3 in a pipeline", {"parallelism": {**PIPELINE, "data_parallel": "zero3"}},
     "data_parallel zero3 works without pipeline stages", "parallelism"),
    ("transfers that are not there", {"parallelism": {"enable_async_tensor_parallel": True}},
     "enable_async_tensor_parallel has no transfers to hide with tensor_parallel_degree 1", "parallelism"),
    ("a technique with one axis", {"parallelism": {"data_parallel": "local_sgd", "tensor_parallel_degree": 2}},
     "data_parallel local_sgd works with data-parallel ranks only", "parallelism"),
    ("checkpoints between exchanges", {"parallelism": {"data_parallel": "local_sgd"}, "checkpoint": {"interval": 2}},
     "checkpoint.interval 2 is no multiple of the 8 steps", "checkpoint"),
    ("a degree below one", {"parallelism": {"tensor_parallel_degree": -1}},
     "Train.parallelism.tensor_parallel_degree = -1", "parallelism.tensor_parallel_degree"),
]  # fmt: skip


@pytest.fixture(scope="module")
def said(data_folder, tmp_path_factory) -> list[list[str]]:
    """Of each rank, the errors of all rows."""
    out = tmp_path_factory.mktemp("bad") / "x"
    specs = [{**SPEC, **fields} for _, fields, _, _ in TABLE]
    ended = together(2, refused, specs, str(data_folder), str(out))
    assert all(one.returncode == 0 for one in ended), [one.stderr[-2000:] for one in ended]
    return [one.result for one in ended]


@pytest.mark.parametrize("place", range(len(TABLE)), ids=[row[0] for row in TABLE])
def test_a_bad_input_is_one_error_on_both_ranks(place, said):
    _, _, what, way = TABLE[place]
    ours, theirs = (errors[place] for errors in said)
    assert ours == theirs
    first, fix = ours.split("\nfix: ")
    assert what in first and way in f"{first}; {fix}"


def test_an_error_that_one_rank_has_before_they_meet_ends_both():
    """A folder, an option or a package that one machine lacks: it was printed by nobody when its rank was not the first."""
    ours, theirs = (one.result for one in together(2, early, "no folder data-small"))
    assert (
        ours == "rank 1: no folder data-small\nfix: copy it True"
        and theirs == "told rank 1: no folder data-small\nfix: copy it"
    )


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"RANK": "1"}, "the environment says RANK=1, LOCAL_RANK=(not set), WORLD_SIZE=(not set)"),
        ({"WORLD_SIZE": "2"}, "the environment says RANK=(not set)"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT=(not set)"),
        ({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}, "the environment says RANK=5"),
    ],
)  # fmt: skip
def test_incomplete_torchrun_variables_are_an_error(variables, what, monkeypatch, capsys, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tmp_path), f"--out={tmp_path}/x", "--steps=1"]) == 2
    printed = capsys.readouterr().err
    assert what in printed and "fix: start it with torchrun, or unset these variables" in printed
    assert printed.count("error: ") == 1


@pytest.mark.parametrize("port", ["taken", "abc"])
def test_a_port_that_is_in_use_or_none(port, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1]) if port == "taken" else port
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            MachineError, match=f"rank 0 cannot meet the other ranks at MASTER_ADDR=127.0.0.1, MASTER_PORT={number}: "
        ) as error:
            Mesh(0, 0, 2).gather(1)
    assert "MASTER_PORT" in error.value.fix
