"""A short form of benchmarks.soak: random load, kills, nothing left behind."""

import argparse

import pytest

from benchmarks import soak

pytest.importorskip("jsonschema")


def enough(one: soak.Soak) -> bool:
    """Whether what the test asks for was seen: how much a time holds is the machine's, and what runs beside."""
    last, done = one.rests[-1] if one.rests else {}, one.clients.done
    return (
        len(one.rests) >= 2
        and done["greedy reply compared"] > 10
        and done["generate: left"] > 0
        and (not one.server.adapters or done["adapter came and went"] > 0)
        and all(last.get(name) for name in ("prefix_cache_hits", "num_preemptions"))
    )


@pytest.mark.slow(seconds=35)
@pytest.mark.parametrize("kind", ["plain", "adapters"])
def test_nothing_is_left_of_a_load(tmp_path, kind):
    fields = {
        "minutes": 0.35,
        "users": 16,
        "rest": 3.0,
        "killing": 0.4,
        "kill_every": 4.0,
        "seed": 5,
        "kind": kind,
        "engine": "{}",
    }
    report = soak.soak(argparse.Namespace(**fields), tmp_path, enough)
    assert report["faults"] == []
    assert report["rests"] >= 2 and sum(report["kills"].values()) >= 1
    assert report["acts"]["greedy reply compared"] > 10 and report["acts"]["generate: left"] > 0
    assert kind != "adapters" or report["acts"]["adapter came and went"] > 0
    assert report["totals"]["prefix_cache_hits"] > 0 and report["totals"]["num_preemptions"] > 0


def test_the_soak_reports_memory_growth_and_errors_as_faults(tmp_path):
    """What the checks are for: a growing process, a traceback, a changed reply."""

    class Server:
        url, adapters = "http://127.0.0.1:1", {}

        def text(self):
            return "Traceback (most recent call last): ..."

        def disturbed(self, begun):
            return False

    one = soak.Soak(argparse.Namespace(seed=0), Server())
    one.clients.wrong += ["greedy: AssertionError: greedy text is 'a', was 'b'"] * 2
    steady = dict.fromkeys(soak.MOST, 5.0)
    one.rests = [steady | {"engine_mib": 100.0 + 4 * place, "front_tasks": 3.0 + 2 * place} for place in range(9)]
    faults = "\n".join(one.judge()["faults"])
    assert "engine_mib grew by 12.0" in faults and "front_tasks grew by 6.0" in faults and "front_mib" not in faults
    assert "Traceback" in faults and "was 'b' (2 times)" in faults
