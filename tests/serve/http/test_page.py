"""The page at `/`: sent without a key, allowed by its own policy and nothing else, and alive in a browser where one is there."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hone.serve.http.endpoints import page
from tests.serve.live import LiveServer

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = Path(page.__file__).with_name("page.html").read_text(encoding="utf8")


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[LiveServer]:
    live = LiveServer(tiny_llama, "tests.serve.fake_engine:build", api_key="secret", served_model_name="a model")
    yield live
    live.stop()


def test_the_page_is_sent_without_a_key_and_holds_nothing_of_the_server(server: LiveServer):
    reply = httpx.get(server.url + "/", timeout=180)
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text == TEXT and httpx.head(server.url + "/", timeout=180).content == b""
    assert httpx.get(server.url + "/v1/models", timeout=180).status_code == 401
    assert 'hone:http_replies_total{endpoint="/"' in server.http.get("/metrics").text


def test_the_pages_policy_allows_its_own_script_and_style_alone(server: LiveServer):
    headers = httpx.get(server.url + "/", timeout=180).headers
    rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (
        rules["default-src"] == "'none'" and rules["connect-src"] == "'self'" and rules["frame-ancestors"] == "'none'"
    )
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_loads_nothing_from_elsewhere_and_shows_text_as_text():
    assert not re.search(r"https?://|src=|@import|url\(", TEXT)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser", TEXT
    )
    assert not re.search(r"<[^>]*\s(on\w+|style)=", TEXT.partition("<script>")[0])
    for name in re.findall(r'el\("([\w-]+)"\)', TEXT):
        assert f'id="{name}"' in TEXT, name


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_the_page_works_in_a_browser(tiny_llama: Path, tmp_path: Path):
    live = LiveServer(tiny_llama, "tests.serve.fake_engine:build", served_model_name="a model")
    try:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=20000",
        ]
        done = subprocess.run([BROWSER, *flags, "--dump-dom", live.url], capture_output=True, text=True, timeout=120)
    finally:
        live.stop()
    assert '<h1 id="model">a model</h1>' in done.stdout, done.stderr  # its script ran, and the server answered it
    assert "context of 100000 tokens" in done.stdout
