"""tiktoken gives the ids of `tokenizers` on any text, and what it could get wrong is refused with the reason."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from hone.data.tokens import fast
from hone.data.tokens.fast import build
from hone.data.tokens.spec import Tokenizer
from hone.data.tokens.tokenizer import load, train

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
HARD = [
    "",
    " ",
    "  \n ",
    "a\u00a0b\u2003 c\u3000\n\n  d",
    "'S 'ſ IT'LL don't we'Ve 'd''",
    "e\u0301 \u1e9b\u0323 한국어 \u1112\u1161\u11ab",
    "123456 ①²½ ٣٤٥ 12,345.678\r\n\r\n\t x",
    "🙂👩‍👩‍👧 \ufeff\u200b\u00ad日本語。テスト！",
    "<|endoftext|> <|im_start|>a<tool>b",
    "   " * 11 + "x" + "\t" * 9 + "\n" * 7,
    "\x00\x01\x85\u2028\u2029\x1c\x1f",
    "a" * 3000 + " " * 3000 + "é" * 3000 + "\n \n" * 1000 + "!?" * 2000,
    "\U000323af\U00031350\U0002ebf0\U0001e4d0\U000105c0\U0001c0de\u0378",
]


def _merges(text: str) -> list[tuple[str, str]]:
    return [tuple(line.split(" ")) for line in text.splitlines() if line and not line.startswith("#version")]


def gpt2(data: Path, **options) -> Core:
    folder = data / "tokenizers" / "gpt2"
    vocab = json.loads((folder / "encoder.json").read_text())
    core = Core(models.BPE(vocab=vocab, merges=_merges((folder / "vocab.bpe").read_text(encoding="utf8"))))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>"])
    return core


def pythia(data: Path) -> Core:
    return Core.from_str(
        gzip.decompress((data / "tokenizers/pythia-neox/tokenizer.json.gz").read_bytes()).decode("utf8")
    )


def qwen2(data: Path, pattern: str = QWEN2) -> Core:
    folder = data / "tokenizers" / "qwen2"
    vocab = json.loads(gzip.decompress((folder / "vocab.json.gz").read_bytes()))
    merges = _merges(gzip.decompress((folder / "merges.txt.gz").read_bytes()).decode("utf8"))
    core = Core(models.BPE(vocab=vocab, merges=merges))
    core.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return core


MAKERS = {
    "gpt2": gpt2,
    "gpt2 with a space before": lambda data: gpt2(data, add_prefix_space=True),
    "pythia": pythia,
    "qwen2": qwen2,
    "llama3's pattern": lambda data: qwen2(data, LLAMA3),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def both(request, shared_data):
    core = MAKERS[request.param](shared_data)
    core.encode_special_tokens = True
    made, why = build(core, np.dtype("<u4"))
    assert made is not None, why
    return core, made


def real_texts(data: Path) -> list[str]:
    """Prose in 75 languages, code in several, books: a few hundred thousand characters."""
    with gzip.open(data / "langid" / "lingua-sentences-75x1000.jsonl.gz", "rt", encoding="utf8") as file:
        sentences = [json.loads(line) for line in file]
    draw = random.Random(3)
    texts = [" ".join(str(value) for value in row.values()) for row in draw.sample(sentences, 1500)]
    with gzip.open(data / "code" / "permissive-code.jsonl.gz", "rt", encoding="utf8") as file:
        rows = [json.loads(line) for line in file]
    texts += [max(map(str, row.values()), key=len)[:20_000] for row in draw.sample(rows, 40)]
    for path in sorted((data / "books").glob("*.gz"))[:4]:
        texts.append(gzip.decompress(path.read_bytes()).decode("utf8", "replace")[5000:60_000])
    return texts


def same(core: Core, made, text: str) -> bool:
    """Whether both agree; text that the fast one leaves to the other counts as agreed."""
    found = made.encode(text)
    return found is None or found.tolist() == core.encode(text, add_special_tokens=False).ids


def test_real_text_in_all_languages(both, shared_data):
    core, made = both
    texts = real_texts(shared_data)
    slow = [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]
    quick = [made.encode(text) for text in texts]
    assert sum(found is None for found in quick) < 0.02 * len(texts)
    wrong = [text for text, ids, found in zip(texts, slow, quick) if found is not None and found.tolist() != ids]
    assert not wrong, wrong[0][:200]


def test_hard_text(both):
    core, made = both
    for text in HARD:
        assert same(core, made, text), repr(text[:60])


@settings(max_examples=300)
@given(
    st.text(max_size=60)
    | st.text(alphabet=" \n\t\r'aAsſSlLéß1²<|>endoftxt.\u0301\u00a0", max_size=60)
    | st.lists(st.sampled_from([*HARD[:11], "  ", "the", "'re", "12345", "<|endoftext|>", "<|padding|>"])).map("".join)
)
def test_any_text(both, text):
    core, made = both
    assert same(core, made, text)


def test_own_tokenizers(tmp_path, shared_data):
    texts = real_texts(shared_data)
    train(Tokenizer(vocab_size=3000), texts[::2], tmp_path)
    encoder = load(tmp_path)
    assert encoder.fast is not None and encoder.why_slow == ""
    slow = encoder._replace(fast=None)
    for one, other in zip(encoder.encode(texts + HARD), slow.encode(texts + HARD)):
        assert one.dtype == other.dtype == np.dtype("<u2") and one.tolist() == other.tolist()


def small(vocab_more: list[str], merges: list[tuple[str, str]], **options) -> Core:
    """A byte-level BPE over all bytes with these merges."""
    letters = sorted(fast._byte_letters())
    names = [*letters, *dict.fromkeys([*vocab_more, *(a + b for a, b in merges)])]
    core = Core(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=merges, **options))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return core


WORDS = st.text(alphabet="abc", min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.tuples(WORDS, WORDS), max_size=12), st.booleans(), st.data())
def test_random_merges_are_right_or_refused(pairs, ignore, data):
    """Merges in any order and of any parts: whatever is not refused must agree."""
    known = ["a", "b", "c"]
    merges = []
    for left, right in pairs:  # of parts that exist, so that a good share is not refused
        left, right = known[len(left) * 7 % len(known)], known[len(right) * 5 % len(known)]
        if (left, right) not in merges and len(left + right) < 12:
            merges.append((left, right))
            known.append(left + right)
    merges = data.draw(st.permutations(merges)) if ignore else merges
    core = small(["cab", "bbb"], merges, ignore_merges=ignore)
    made, why = build(core, np.dtype("<u2"))
    assert (made is None) == bool(why)
    if made is not None:
        for text in data.draw(st.lists(st.text(alphabet="abc ", max_size=30), min_size=5, max_size=5)):
            assert same(core, made, text)


def test_merges_that_ranks_cannot_express_are_refused():
    assert build(small([], [("a", "b"), ("ab", "c")]), np.dtype("<u2"))[1] == ""
    # 'abc' from 'ab' + 'c' cannot be reached: 'b' + 'c' goes first and leaves 'a', 'bc'.
    _, why = build(small([], [("b", "c"), ("a", "b"), ("ab", "c")]), np.dtype("<u2"))
    assert why == "its merges do not lead to its token 'abc'"
    _, why = build(small([], [("a", "b"), ("ab", "a"), ("b", "a"), ("a", "ba")]), np.dtype("<u2"))
    assert "are not consecutive" in why
    assert build(small(["ba"], [("a", "b"), ("ab", "a"), ("a", "ba")]), np.dtype("<u2"))[1] == ""
    # A token that only whole words may be, and whose bytes come down to two parts: inside a word it must stay two.
    _, why = build(small(["abc"], [("a", "b")], ignore_merges=True), np.dtype("<u2"))
    assert why == "its token 'abc' is only used as a whole word"
    made, why = build(small(["abc"], [], ignore_merges=True), np.dtype("<u2"))
    assert why == "" and made.encode("abc").tolist() == [256] and len(made.encode("abcabc")) == 6


def changed(core: Core, **parts) -> Core:
    for name, part in parts.items():
        setattr(core, name, part)
    return core


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Core(models.WordPiece({"a": 0}, unk_token="a")), "pre-tokenizer"),
        (lambda: changed(small([], []), pre_tokenizer=pre_tokenizers.Whitespace()), "pre-tokenizer"),
        (lambda: changed(small([], []), normalizer=normalizers.Lowercase()), "its normalizer is Lowercase, not NFC"),
        (lambda: small([], [], byte_fallback=True), "byte_fallback"),
        (lambda: small([], [], dropout=0.1), "dropout"),
        (lambda: changed(Core(models.Unigram()), pre_tokenizer=pre_tokenizers.ByteLevel()), "Unigram, not BPE"),
        (
            lambda: changed(Core(models.BPE(vocab={"a": 0}, merges=[])), pre_tokenizer=pre_tokenizers.ByteLevel()),
            "lacks the byte 0x21",
        ),
    ],
)
def test_other_kinds_are_refused(make, why):
    made, reason = build(make(), np.dtype("<u2"))
    assert made is None and why in reason


def test_added_tokens():
    core = small([], [(" ".replace(" ", "Ġ"), "a"), ("a", "b")])
    core.normalizer = normalizers.NFC()
    core.add_tokens([AddedToken("  ", normalized=True), AddedToken("    ", normalized=True), "<tool>"])
    core.add_tokens([AddedToken("é!", normalized=True), AddedToken("aé", normalized=False)])
    core.add_special_tokens(["<|a    b|>"])
    core.encode_special_tokens = True
    made, why = build(core, np.dtype("<u2"))
    assert why == ""
    draw = random.Random(1)
    parts = [" ", "  ", "a", "b", "<tool>", "<|a    b|>", "é!", "e\u0301", "!", "aé", "\n", "<tool"]
    for _ in range(500):
        text = "".join(draw.choices(parts, k=draw.randint(0, 14)))
        assert same(core, made, text), repr(text)
    core.add_tokens([AddedToken("<x>", lstrip=True)])
    assert "takes spaces around it" in build(core, np.dtype("<u2"))[1]


def test_without_tiktoken_it_says_so(tmp_path, monkeypatch):
    train(Tokenizer(vocab_size=300), ["some text, some more text"] * 9, tmp_path)
    before = load(tmp_path).encode(["some text"])[0]
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    encoder = load(tmp_path)
    assert encoder.fast is None and "'tiktoken' is not installed" in encoder.why_slow
    assert encoder.encode(["some text"])[0].tolist() == before.tolist()


def test_a_disputed_character_goes_the_slow_way(tmp_path, monkeypatch):
    train(Tokenizer(vocab_size=300), ["some text, some more text"] * 9, tmp_path)
    encoder = load(tmp_path)
    suspects = np.zeros(sys.maxunicode + 1, bool)
    suspects[ord("ü")] = True
    monkeypatch.setattr(fast, "_suspects", lambda unassigned: suspects)
    assert encoder.fast.encode("aüb") is None and encoder.fast.encode("aöb") is not None
    for text in ("aüb", "aöb"):
        assert encoder.encode([text])[0].tolist() == encoder._replace(fast=None).encode([text])[0].tolist()


@pytest.mark.slow
def test_suspects_are_found_by_asking_both_libraries(monkeypatch):
    """Python's own unassigned characters are suspects where it has to tell NFC; a class that one library has more of, always."""
    import tiktoken

    fast._suspects.cache_clear()
    known = fast._suspects(True)
    assert known[0x0378] and not known[ord("é")] and not known[ord("語")] and not known[0x1F642]
    real = tiktoken.Encoding

    class Older(real):
        """Knows no letter ü."""

        def encode_to_numpy(self, text, **options):
            return real.encode_to_numpy(self, text.replace("ü", ""), **options)

    fast._suspects.cache_clear()
    monkeypatch.setattr(tiktoken, "Encoding", Older)
    found = fast._suspects(False)
    fast._suspects.cache_clear()
    assert np.flatnonzero(found).tolist() == [ord("ü")]
