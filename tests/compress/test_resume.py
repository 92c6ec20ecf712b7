"""kill -9 at every kind of moment: the resumed run ends with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import forking


@pytest.fixture(scope="module")
def child():
    """Compresses in a process of its own: child(spec, model, out, deadline=0, when='after')."""
    with forking("tests.compress.killed:compress") as call:
        yield call


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "hone.json" and "log" not in path.parts
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "deadlines"),
    [
        ([{"kind": "gptq", "bits": 4, "group_size": 32}], [(1, "after"), (2, "after"), (3, "before"), (4, "after")]),
        ([{"kind": "gptaq", "bits": 3, "group_size": 32}], [(2, "after"), (4, "after"), (3, "before")]),
        ([{"kind": "rtn", "bits": 8, "group_size": 0}], [(3, "before")]),
        ([{"kind": "wanda", "pattern": "2:4"}], [(4, "after"), (2, "before")]),
        ([{"kind": "magnitude", "scope": "global"}], [(4, "after"), (3, "before")]),
        ([{"kind": "sparsegpt"}, {"kind": "gptq", "bits": 4, "group_size": 32}], [(4, "after"), (3, "before")]),
        ([{"kind": "gptq", "group_size": 32, "sparsity": 0.5, "pattern": "2:4"}], [(3, "after"), (4, "before")]),
        ([{"kind": "nvfp4", "activations": "nvfp4"}], [(3, "after"), (4, "before")]),
        (
            [{"kind": "gptq", "bits": 8, "group_size": 0, "activations": "int8_tensor", "observer": "entropy"}],
            [(3, "after")],
        ),
        (
            [{"kind": "gptq", "bits": 8, "group_size": 0, "activations": "int8_tensor", "observer": "cross_entropy"}],
            [(1, "after"), (4, "after")],
        ),
        ([{"kind": "awq"}, {"kind": "gptq", "bits": 4, "group_size": 32}], [(3, "after"), (4, "before")]),
        (
            [{"kind": "rotation", "r4": True}, {"kind": "gptq", "group_size": 0, "activations": "int4_token"}],
            [(3, "after"), (4, "before")],
        ),
        (
            [{"kind": "gptq", "bits": 3, "group_size": 32}, {"kind": "eora", "rank": 4}],
            [(2, "after"), (4, "before"), (6, "after")],
        ),
        ([{"kind": "nvfp4", "activations": "nvfp4"}, {"kind": "loftq", "rank": 4}], [(3, "after"), (5, "after")]),
        ([{"kind": "wanda"}, {"kind": "eora", "rank": 4}], [(4, "after"), (3, "before")]),
        ([{"kind": "asvd", "ratio": 0.5}], [(3, "after"), (4, "before")]),
        ([{"kind": "kv_cache", "per": "head"}], [(3, "after"), (4, "before")]),
        ([{"kind": "gptq", "group_size": 32}, {"kind": "kv_cache", "observer": "mse"}], [(3, "after")]),
        ([{"kind": "width", "num_heads": 2, "hidden_size": 32}], [(1, "before"), (1, "after"), (2, "after")]),
        ([{"kind": "depth"}, {"kind": "gptq", "group_size": 32}], [(1, "after"), (2, "before"), (2, "after")]),
    ],
)
def test_killed_runs_end_with_the_same_bytes(
    steps: list, deadlines: list, child, tiny_llama: Path, calibration_text: Path, tmp_path: Path
) -> None:
    spec = {"steps": steps, "num_sequences": 8, "seq_len": 32}
    if steps[0]["kind"] not in ("rtn", "magnitude"):
        spec["calibration_text"] = str(calibration_text)
    whole = child(spec, tiny_llama, tmp_path / "compress-whole")
    assert whole.returncode == 0, whole.stderr
    for deadline, when in deadlines:  # one after the other on the same folder: each resumes what the last one left
        died = child(spec, tiny_llama, tmp_path / "compress-torn", deadline, when)
        assert died.returncode == -9, f"{died.returncode}: {died.stderr}"
        assert (tmp_path / "compress-torn.partial").is_dir() and not (tmp_path / "compress-torn").exists()
    resumed = child(spec, tiny_llama, tmp_path / "compress-torn")
    assert resumed.returncode == 0, resumed.stderr
    assert contents(tmp_path / "compress-torn") == contents(tmp_path / "compress-whole")
    assert resumed.result[1] == whole.result[1]
    assert resumed.result[0] < whole.result[0], "nothing was resumed"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [["magnitude", "gptq"], ["gptq", "eora"]])  # shards alone; an adapter beside them
def test_killed_at_every_durable_write(
    steps: list[str], child, tiny_llama: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options = {"gptq": {"bits": 3, "group_size": 32}, "eora": {"rank": 4}}
    spec = {
        "steps": [{"kind": kind, **options.get(kind, {})} for kind in steps],
        "num_sequences": 8,
        "seq_len": 32,
        "calibration_text": str(calibration_text),
    }
    whole = child(spec, tiny_llama, tmp_path / "compress-whole")
    assert whole.returncode == 0, whole.stderr
    for deadline in range(1, whole.result[0] + 1):
        out, when = tmp_path / f"compress-{deadline}", ("before", "after")[deadline % 2]
        assert child(spec, tiny_llama, out, deadline, when).returncode == -9
        if not out.exists():  # a kill after the last rename leaves nothing to do
            resumed = child(spec, tiny_llama, out)
            assert resumed.returncode == 0, resumed.stderr
        assert contents(out) == contents(tmp_path / "compress-whole"), (deadline, when)
