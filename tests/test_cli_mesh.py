"""Plans for ranks that are not there: `--plan --mesh=1024xH200`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hone.base.errors import SpecError
from hone.cli.dispatch import main
from hone.cli.mesh import planned_run
from hone.cli.options import circumstances
from hone.cost.pipeline.simulate import simulate
from hone.cost.ranks import LINK_BYTES_PER_S, NETWORK_BYTES_PER_S, Transfers, link_bytes_per_s
from hone.cost.train import pipeline as cost
from hone.measure.machine import machine_of
from tests.train.conftest import write_data

TRILLION = [
    "--model.num_layers=128", "--model.hidden_size=25600", "--model.num_heads=160", "--model.num_kv_heads=160",
    "--model.head_dim=160", "--model.intermediate_size=68352", "--model.max_seq_len=2048", "--seq_len=2048",
    "--batch_size=256", "--gradient_accumulation_steps=32", "--steps=10", "--precision=bf16",
    "--activation_checkpointing={kind: every_nth, n: 1}", "--parallelism.data_parallel=zero1",
    "--parallelism.tensor_parallel_degree=8", "--parallelism.pipeline_parallel_degree=16",
    "--parallelism.pipeline_parallel_schedule=interleaved",
]  # fmt: skip


def test_a_trillion_parameters_on_1024_gpus(tmp_path, capsys, monkeypatch):
    """8 data-parallel x 16 pipeline x 8 tensor-parallel ranks: memory, bubble, transfers and MFU of every pipeline rank."""
    data, played = write_data(tmp_path / "data"), []
    monkeypatch.setattr(cost, "simulate", lambda *given: played.append(given) or simulate(*given))
    assert main(["train", str(data), "--plan", "--mesh=1024xH200", *TRILLION]) == 0
    assert len(played) == 1, "one simulation serves estimates, notes and the drawing"
    said = capsys.readouterr().out
    assert "1024 ranks on NVIDIA H200 SXM, 131.3 GiB of memory" in said and "cores" not in said
    # (p - 1) / (v n + p - 1) of arXiv:2104.04473 with p 16, v 2 and n 32, and the ends of the model.
    bubble = float(said.partition("bubble ")[2].partition("%")[0])
    assert abs(bubble - 100 * 15 / (2 * 32 + 15)) < 2
    assert "between stages (link rates are not calibrated)" in said and "MFU" in said
    ranks = [line for line in said.splitlines() if line.strip().partition(" ")[0].isdigit() and " M " in line]
    assert len(ranks) == 16 and "0-3 64-67" in ranks[0] and "60-63 124-127" in ranks[15]


@pytest.mark.slow
def test_a_trillion_parameters_as_the_page_of_pipelines_says(tmp_path, capsys):
    page = (Path(__file__).parent.parent / "docs" / "pipelines.md").read_text(encoding="utf8")
    told = re.search(r"in 384 micro-batches: at most (\d+) GiB a GPU, bubble ([\d.]+) %, MFU (\d+) % at most", page)
    assert told is not None
    more = {
        "--batch_size=256": "--batch_size=3072",
        "--gradient_accumulation_steps=32": "--gradient_accumulation_steps=384",
    }
    data = write_data(tmp_path / "data")
    assert main(["train", str(data), "--plan", "--mesh=1024xH200", *(more.get(one, one) for one in TRILLION)]) == 0
    said = capsys.readouterr().out
    memory = max(float(one) for one in re.findall(r"^ *\d+  \d+-.* ([\d.]+) GiB", said, re.MULTILINE))
    assert memory == pytest.approx(float(told[1]), rel=0.02)
    assert float(re.search(r"bubble ([\d.]+)%", said)[1]) == pytest.approx(float(told[2]), abs=0.1)
    assert float(re.search(r"MFU at most ([\d.]+)%", said)[1]) == pytest.approx(float(told[3]), abs=1)


def test_ranks_of_this_machine_and_errors(tmp_path, capsys):
    data = write_data(tmp_path / "data")
    small = ["--batch_size=8", "--seq_len=32", "--steps=3", "--model.num_layers=2"]
    assert main(["train", str(data), "--plan", "--mesh=4", *small]) in (0, 2)  # as its memory allows
    assert "4 ranks on" in capsys.readouterr().out
    assert main(["train", str(data), f"--out={tmp_path}/x", "--mesh=4", *small]) == 2
    assert "add --plan" in capsys.readouterr().err
    for wrong in ("0", "many", "8x", "x8", "-3"):
        with pytest.raises(SpecError, match="is no number of ranks"):
            planned_run(wrong, circumstances({}))
    with pytest.raises(SpecError, match="no accelerator 'B9000'"):
        planned_run("8xB9000", circumstances({}))
    with pytest.raises(SpecError, match="TPU v5p is no GPU"):
        planned_run("8xv5p", circumstances({}))


def test_links_are_those_of_the_gpu():
    """An A100 has two thirds of an H100's NVLink and half of its port to other machines; 72 of a GB200's rack are neighbours."""
    rates = {
        name: [
            link_bytes_per_s("cuda", span, machine_of(planned_run(f"8x{name}", circumstances({}))).processor)
            for span in (8, 72)
        ]
        for name in ("A100", "H200", "B200", "GB200")
    }
    assert rates["H200"] == pytest.approx([LINK_BYTES_PER_S["cuda"], NETWORK_BYTES_PER_S])
    assert rates["A100"] == pytest.approx([2 / 3 * 300e9, 20e9])
    assert rates["B200"] == pytest.approx([600e9, 40e9]) and rates["GB200"] == pytest.approx([600e9, 600e9])
    assert link_bytes_per_s("cuda", 8, "NVIDIA X1") == LINK_BYTES_PER_S["cuda"]


def test_ranks_that_are_not_there_need_no_data_for_their_batches(tmp_path, capsys):
    """A layout is asked for, maybe with a sample of the data: the batch is noted where a training here would be refused."""
    data = write_data(tmp_path / "data", num_documents=8)
    sizes = ["--batch_size=256", "--seq_len=32", "--steps=3", "--model.num_layers=2"]
    for mesh, ranks in (("--mesh=2", "2 ranks on"), ("--mesh=16xH200", "16 ranks on NVIDIA H200")):
        assert main(["train", str(data), "--plan", mesh, *sizes]) in (0, 2)  # as this memory allows
        said = capsys.readouterr().out
        assert ranks in said and "fewer than batch_size 256: every batch has each about " in said
        assert "transfers of a rank:" in said
    assert main(["train", str(data), "--plan", *sizes]) == 2
    assert "times in every batch" in "".join(capsys.readouterr())
    assert "planned" not in machine_of(planned_run("2", circumstances({}))).model_dump()


def test_groups_larger_than_a_machine_exchange_over_the_network():
    times, num_bytes = Transfers("cuda", stride=8), 1e9
    inside = Transfers("cuda").seconds("all_gather", 8, num_bytes)
    assert inside == pytest.approx(7 / 8 * num_bytes / LINK_BYTES_PER_S["cuda"], rel=0.01)
    assert times.seconds("all_gather", 8, num_bytes) == pytest.approx(7 / 8 * num_bytes / NETWORK_BYTES_PER_S, rel=0.01)
    near, far = (Transfers("cuda").seconds("all_reduce", 2, num_bytes, apart) for apart in (1, 8))
    assert far / near == pytest.approx(LINK_BYTES_PER_S["cuda"] / NETWORK_BYTES_PER_S, rel=0.01)
