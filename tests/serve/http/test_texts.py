"""Long texts and chat templates: neither stops the server, and both have limits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hone.model.tokenizer import Tokenizer, load_tokenizer
from hone.serve.http.processes.messages import framed
from hone.serve.http.texts.longest import LengthBound
from hone.serve.http.texts.pool import ENCODE_BYTES, ENCODE_S, RENDER_BYTES, TextError, TextPool
from tests.conftest import byte_tokenizer
from tests.serve.live import LiveServer

HANGS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
SWELLS = "{{ '%2000000000d' % messages|length }}"
LONG = (60.0, RENDER_BYTES)
"""A deadline that no text here needs, and the usual limit of memory."""
MESSAGES = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    byte_tokenizer().save_pretrained(path)
    (path / "config.json").write_text("{}")
    return path


def template(folder: Path, text: str) -> str:
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)


def with_pool(work: Callable[[TextPool], Coroutine[Any, Any, None]], folder: Path, source: str = "", **more) -> None:
    async def main() -> None:
        pool = TextPool(folder, source, count=1, **more)
        await pool.start()
        try:
            await work(pool)
        finally:
            await pool.close()

    asyncio.run(main())


def test_the_processes_give_the_tokenizers_own_ids_and_texts(folder: Path):
    tokenizer = load_tokenizer(folder)
    texts = ["the quick é", "", "a" * 9000, "日本 \U0001f600"]

    async def work(pool: TextPool) -> None:
        assert await pool.encode(texts, True) == [tokenizer.encode(text) for text in texts]
        assert await pool.render(MESSAGES, True, {}) == tokenizer.chat(MESSAGES)

    with_pool(work, folder)


def test_a_template_that_hangs_or_swells_fails_alone(folder: Path):
    source = "{% if messages[0]['content'] == 'hang' %}" + HANGS + "{% elif messages[0]['content'] == 'swell' %}"
    source += SWELLS + "{% endif %}fine"

    async def work(pool: TextPool) -> None:
        short = pool._render
        for word, why in (
            ("hang", r"more than 0\.5 s"),
            ("swell", "memory|MemoryError"),
            ("hang", r"more than 0\.5 s"),
        ):
            pool._render = short if word == "hang" else LONG  # what ends has time for it: the machine may be busy
            with pytest.raises(TextError, match=why):
                await pool.render([{"role": "user", "content": word}], True, {})
            pool._render = LONG
            assert await pool.render(MESSAGES, True, {}) == "fine"

    with_pool(work, folder, template(folder, source), render_s=0.5)


def test_a_text_beyond_its_time_or_memory_and_a_killed_process(folder: Path):
    async def work(pool: TextPool) -> None:
        with pytest.raises(TextError, match=r"more than 0\.5 s"):
            await pool.encode(["the quick " * 400_000], True)
        pool._encode = (ENCODE_S, ENCODE_BYTES)  # what ends has time for it: the machine may be busy
        assert len(await pool.encode(["a"], True)) == 1
        (child,) = pool._idle
        child._process.kill()
        while child.alive:  # until it is known that it ended
            await asyncio.sleep(0.01)
        assert len(await pool.encode(["a"], True)) == 1

    with_pool(work, folder, encode_s=0.5)

    async def small(pool: TextPool) -> None:
        with pytest.raises(TextError, match="memory"):
            await pool.encode(["the quick " * 400_000], True)
        assert len(await pool.encode(["a"], True)) == 1

    with_pool(small, folder, encode_bytes=32 * 2**20)


@pytest.mark.parametrize("sent", [0, 3, 8, 40])
def test_the_process_ends_without_a_word_when_the_server_is_killed(folder: Path, sent: int):
    """Between two jobs, or in the middle of one."""
    command = [sys.executable, "-m", "hone.serve.http.texts.child", str(folder)]
    told = framed(("encode", ENCODE_BYTES, (["the quick brown fox"] * 9, True)))[:sent]
    done = subprocess.run(command, input=told, capture_output=True, timeout=300)
    assert done.returncode == 0 and done.stderr == b""


def test_the_process_ends_without_a_word_when_nobody_reads_its_answer(folder: Path):
    command = [sys.executable, "-m", "hone.serve.http.texts.child", str(folder)]
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        done = subprocess.run(command, input=b"", stdout=nobody, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 0 and done.stderr == b""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    live = LiveServer(folder, "tests.serve.fake_engine:build_wide", chat_template=template(folder, SWELLS))
    yield live
    live.stop()


def test_a_text_of_megabytes_stops_nobody_and_its_memory_is_given_back(server: LiveServer):
    counts: list[int] = []

    def ask() -> None:
        counts.append(server.post("/tokenize", prompt="the quick brown " * 200_000).json()["count"])

    asking = threading.Thread(target=ask)
    asking.start()
    replies = 0
    while asking.is_alive():
        replies += server.http.get("/health").status_code == 200
        time.sleep(0.01)
    assert counts and counts[0] > 200_000
    assert replies > 5  # two with tokenization in the server's process: one before it, one after
    assert psutil.Process(server.process.pid).memory_info().rss < 600 * 2**20


def test_a_template_that_fails_is_the_templates_error(server: LiveServer):
    """By memory; one that hangs fails in the same way (above), at a deadline of 5 s here."""
    reply = server.post("/v1/chat/completions", messages=MESSAGES)
    assert reply.status_code == 400 and "chat template" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "chat_template_failed"


# ---- the bound on a text's tokens ----------------------------------------------------------------------------------


def tokenizer_of(normalizer: Any = None, pre: Any = None, **model: Any) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: index for index, letter in enumerate([*sorted(alphabet), "ee", "eeee"])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("e", "e"), ("ee", "ee")], **model))
    core.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    return Tokenizer(core)


def test_no_text_has_fewer_tokens_than_the_bound_says():
    for one in (tokenizer_of(), tokenizer_of(normalizers.NFC())):
        bound = LengthBound(one)
        for text in ("e" * 4000, "e\u0301" * 999, "\u1100\u1161\u11a8" * 333, "日本" * 50, " \n" * 77, "\u0344" * 9):
            assert 0 < bound.least_tokens(text) <= len(one.encode(text))
    assert LengthBound(tokenizer_of()).least_tokens("e" * 4000) == 1000


def test_rules_that_drop_characters_have_no_bound():
    for one in (
        tokenizer_of(normalizers.Strip()),
        tokenizer_of(normalizers.NFKC()),
        tokenizer_of(pre=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])),
        Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))),
    ):
        assert LengthBound(one).least_tokens("e" * 10_000) == 0


def test_white_space_beside_an_added_token_that_strips_it_does_not_count():
    one = tokenizer_of()
    one.core.add_special_tokens([tokenizers.AddedToken("<x>", rstrip=True)])
    assert len(one.encode("<x>" + " " * 5000)) == 1
    assert LengthBound(one).least_tokens("<x>" + " " * 5000) == 1
