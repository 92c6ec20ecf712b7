"""What an operator copies: the metrics' meanings, the dashboard, alerts, the unit and the container file match the server."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from benchmarks import serving_page
from hone.cli.options import fields, parse
from hone.serve.device.metered import GPU_JOULES
from hone.serve.http.metrics import MEANINGS, ServerMetrics
from hone.serve.http.spec import ServerSpec
from tests.serve.small import decoder, engine

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
KINDS = {name: kind for name, kind, _ in serving_page.metrics()}


def series_of(expression: str) -> set[str]:
    return set(re.findall(r"hone:\w+", expression))


def assert_real(name: str) -> None:
    """`name` is a series that the server has: of a histogram one of its parts."""
    if name in KINDS:
        assert KINDS[name] != "histogram", f"{name} is a histogram: use its _bucket, _sum or _count"
        return
    base, _, part = name.rpartition("_")
    assert KINDS.get(base) == "histogram" and part in ("bucket", "sum", "count"), f"the server has no {name}"


def test_every_figure_of_the_engine_has_a_meaning():
    """As /metrics names them; a new figure of `Engine.stats` or of the front needs a line in MEANINGS."""
    figures = engine(decoder(), lora={"max_loras": 1}).stats() | {"requests_outstanding": 0, "last_step_age_seconds": 0}
    figures |= {GPU_JOULES: 1.0, "output_tokens": 1}  # of a machine with a meter
    names = {name for name, _, _ in ServerMetrics("m", lambda: figures).described()}
    assert names == set(KINDS)
    text = ServerMetrics("m", lambda: figures).text().decode()
    assert "Engine figure" not in text and f"# HELP hone:pages {MEANINGS['pages']}" in text
    assert {name.removesuffix("_total") for name in KINDS} >= {f"hone:{name}" for name in MEANINGS}


def test_the_page_is_what_the_code_says():
    text = serving_page.PAGE.read_text(encoding="utf8")
    assert text == serving_page.filled(text), f"run {serving_page.COMMAND}"


def test_the_dashboard_uses_real_metrics():
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf8"))
    panels = board["panels"]
    used = {name for panel in panels for target in panel["targets"] for name in series_of(target["expr"])}
    for name in used:
        assert_real(name)
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert set(KINDS) - shown == {"hone:pages_used"} - shown, "metrics that no panel shows"
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    for variable in board["templating"]["list"][1:]:
        (name,) = series_of(variable["definition"])
        assert_real(name)


def test_the_alerts_use_real_metrics():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf8"))["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "annotations"}
        for name in series_of(rule["expr"]):
            assert_real(name)
    assert len(group["rules"]) > 5


@pytest.mark.parametrize("name", ["", "hone:nothing", "hone:pages_total", "hone:time_to_first_token_seconds"])
def test_a_wrong_name_is_found(name: str):
    with pytest.raises(AssertionError):
        assert_real(name)


def served(words: list[str]) -> ServerSpec:
    """The spec that `hone WORDS` serves with."""
    given, options = parse(words)
    assert given[0] == "serve" and len(given) == 2
    return ServerSpec.from_overrides(fields(options, "device", "quiet"))


def test_the_unit_starts_what_the_command_line_takes():
    text = (DEPLOY / "hone.service").read_text(encoding="utf8")
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    program, *words = shlex.split(values["ExecStart"])
    assert program.endswith("/hone")
    spec = served(words)
    assert int(values["TimeoutStopSec"]) > spec.drain_s + 5 and values["KillMode"] == "mixed"
    assert values["Restart"] == "on-failure" and int(values["LimitNOFILE"]) > spec.limits.max_connections + 64


def test_the_container_starts_what_the_command_line_takes():
    text = (DEPLOY / "Containerfile").read_text(encoding="utf8")
    entry, command = (json.loads(re.search(rf"^{word} (\[.*\])$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD"))
    assert entry[0] == "hone"
    spec = served([*entry[1:], *command])
    assert f"EXPOSE {spec.port}" in text and spec.host == "0.0.0.0" and f"127.0.0.1:{spec.port}/health" in text
    for source in re.search(r"^COPY (.*) /src/$", text, re.M)[1].split():
        assert (ROOT / source).is_file()
    compile(re.search(r'"-c", "(.*)"\]', text)[1], "health check", "exec")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf8").splitlines()
    copied = [source for line in re.findall(r"^COPY (.*) /src/\w*$", text, re.M) for source in line.split()]
    assert "*" in ignored and {f"!{source}" for source in copied} == {one for one in ignored if one.startswith("!")}
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf8"), re.M)[1]
    assert f"ARG TORCH={pinned}\n" in text, "the image has the torch that the tests run with"
