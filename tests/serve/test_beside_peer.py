"""benchmarks.serve_peer: two engines in turn, each in its process; rows of what came, also when the time was short."""

import argparse
import json
import stat
import sys

import pytest

from benchmarks import ledger, serve_peer
from benchmarks.serve import SHAPES
from benchmarks.serve_load import limit

FAKE = """#!{python}
import json, sys, time
words = sys.argv[1:]
assert words[:2] == ["-m", "benchmarks.serve_load"], words
engine, folder = words[2:4]
assert "vocab_size" in json.load(open(folder + "/config.json"))
out = words[words.index("--json") + 1]
for load in ["start-up", *words[words.index("--loads") + 1:]]:
    time.sleep({seconds})
    unit = {{"batch 1": "ms/token", "start-up": "s"}}.get(load, "tokens/s")
    line = dict(engine=engine, version="1.2" if engine == "vllm" else None, model=folder.rpartition("/")[2])
    with open(out, "a") as file:
        file.write(json.dumps(line | dict(load=load, value={value}, unit=unit)) + chr(10))
    if load == {fails!r}:
        sys.exit("no memory for " + load)
"""


def fake(folder, value=2.0, seconds=0.0, fails=""):
    """An executable that takes the place of a Python with an engine."""
    path = folder / f"engine-{value}-{seconds}-{fails}"
    path.write_text(FAKE.format(python=sys.executable, value=value, seconds=seconds, fails=fails))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_of(tmp_path, peer, *, rounds=2, loads=("batch 1", "prefill")):
    args = {"peer": "vllm", "peer_python": peer, "peer_path": "", "rounds": rounds, "loads": list(loads)}
    args |= {"seconds": 600.0, "json": str(tmp_path / "lines.jsonl"), "profile": False}
    return serve_peer.Run(argparse.Namespace(**args), tmp_path)


def test_engines_take_turns(tmp_path, monkeypatch):
    peer = fake(tmp_path, 4.0)
    monkeypatch.setattr(serve_peer, "PYTHON", fake(tmp_path, 2.0))
    run = run_of(tmp_path, peer)
    run.say({"ceilings": {"read": 1e10, "products": 1e12}, "stamp": {"commit": "abc"}})
    run.shape("tiny", run.ends)
    assert [line["engine"] for line in run.lines if line.get("load") == "prefill"] == ["hone", "vllm"] * 2
    assert serve_peer.read_lines([tmp_path / "lines.jsonl"]) == run.lines
    rows = {row["figure"]: row for row in serve_peer.rows_of(run.lines, serve_peer.configs_of(run.lines))}
    assert set(rows) == {"tiny, serve_load: " + load for load in ("start-up", "batch 1", "prefill")}
    one = rows["tiny, serve_load: batch 1"]
    assert (one["value"], one["n"], one["peer"], one["peer_value"]) == (2.0, 2, "vllm 1.2", 4.0)
    assert one["ratio"] == 0.5 and one["better"] == "lower" and one["order"] == "ABAB"
    bound = limit("batch 1", SHAPES["tiny"][0].config(SHAPES["tiny"][1], None, 0), 1e10, 1e12)
    assert one["of_limit"] == pytest.approx(bound / 2.0) and one["peer_of_limit"] == pytest.approx(bound / 4.0)
    more = rows["tiny, serve_load: prefill"]
    assert more["of_limit"] == pytest.approx(2.0 / more["limit"]) and more["better"] == "higher"
    assert "limit" not in rows["tiny, serve_load: start-up"]
    assert "peer's" in ledger.table(list(rows.values()))


def test_short_time_leaves_out_whole_legs_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve_peer, "PYTHON", fake(tmp_path, 2.0))
    run = run_of(tmp_path, fake(tmp_path, 4.0), loads=["prefill"])

    def now() -> float:
        """60 s are left, and 18 fewer after each leg of the peer."""
        return run.ends - 60.0 + 18.0 * sum((line["engine"], line["load"]) == ("vllm", "prefill") for line in run.lines)

    monkeypatch.setattr(serve_peer.time, "monotonic", now)
    run.shape("tiny", run.ends - 30.0)
    assert [line["leg"] for line in run.lines if line["load"] == "prefill"] == [0, 1, 2]
    assert "so vllm did not run" in capsys.readouterr().out


def test_failure_and_deadline_keep_what_came(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve_peer, "PYTHON", fake(tmp_path, 2.0, 0.3))
    run = run_of(tmp_path, fake(tmp_path, 4.0, fails="batch 1"), rounds=1)
    folder = serve_peer.folder_of("tiny", tmp_path)
    run.leg("vllm", folder, 1, 20.0)
    assert [line["load"] for line in run.lines] == ["start-up", "batch 1"]
    assert "vllm ended with 1: no memory for batch 1" in capsys.readouterr().out
    run.args.loads = ["prefill"] * 600
    run.leg("hone", folder, 0, 5.0)
    assert 1 <= sum(line["engine"] == "hone" for line in run.lines) < 20
    assert "hone stopped after 5 s" in capsys.readouterr().out
    rows = serve_peer.rows_of(run.lines, {})
    assert [row["n"] for row in rows if row["figure"].endswith("start-up")] == [1] and "limit" not in rows[0]


def test_unknown_shape_is_named(tmp_path):
    with pytest.raises(SystemExit, match="--shapes nothing: neither a folder"):
        serve_peer.folder_of("nothing", tmp_path)


def test_rows_of_lines_from_elsewhere(tmp_path, monkeypatch, capsys):
    """--from: the stamp is that of the machine that measured; lines without one are refused."""
    lines = [
        {"stamp": {"commit": "abc", "machine": {"gpus": []}}, "ceilings": {"read": 4e12, "products": 7e14}},
        {"engine": "hone", "model": "qwen3-0.6b", "load": "prefill", "value": 1e5, "unit": "tokens/s", "seconds": 2.0},
        {"engine": "hone", "model": "qwen3-0.6b", "load": "busy", "value": 0.9, "unit": "of wall time", "ms_step": 20},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(ledger, "FOLDER", tmp_path / "ledger")
    monkeypatch.setattr(sys, "argv", ["serve", "--peer", "vllm", "--from", str(path)])
    serve_peer.main()
    first, second = serve_peer.read_lines([tmp_path / "ledger" / "serve.jsonl"])
    assert first["commit"] == "abc" and 0 < first["of_limit"] < 1 and "peer" not in first and first["order"] == "A"
    assert second["ms_step"] == 20 and second["figure"] == "qwen3-0.6b, serve_load: busy"
    path.write_text(json.dumps(lines[1]) + "\n")
    with pytest.raises(SystemExit, match="stamp"):
        serve_peer.main()


@pytest.mark.slow
def test_hone_runs_beside_a_peer(tmp_path):
    """hone itself on a tiny shape, beside a stand-in."""
    run = run_of(tmp_path, fake(tmp_path, 4.0), rounds=1, loads=["batch 1"])
    run.shape("tiny", run.ends)
    (row,) = [row for row in serve_peer.rows_of(run.lines, {}) if row["figure"].endswith("batch 1")]
    assert row["order"] == "AB" and row["value"] > 0 and row["ratio"] == pytest.approx(row["value"] / 4.0)
