"""The tokenizer of a model folder as GGUF metadata: byte-level BPE with its merges, or SentencePiece's with scores."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from hone.base.errors import ArtifactError, SpecError
from hone.model.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types (enum llama_token_type)."""

_NEVER = -1e9
"""Score of a token that no merge produces."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end a text."""

_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_SIGNS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*")
_PATHS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
_REGEXES = {
    rf"{_WORDS}\p{{N}}{{1,3}}{_SIGNS}": {True: "llama-bpe", False: "dbrx"},
    rf"{_WORDS}\p{{N}}{_SIGNS}": {False: "qwen2"},
    rf"{_CASED[0]}{_ENDS}?{_CASED[1]}{_ENDS}?|\p{{N}}{{1,3}}{_PATHS}": {False: "gpt-4o"},
    rf"{_CASED[0]}{_CASED[1]}|\p{{N}}{_PATHS}": {True: "tekken"},
}
"""llama.cpp's pre-tokenizer for the regular expressions of tokenizer.json's Split, by whether whole words are looked up
before merges (`ignore_merges`)."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Those that look whole words up."""
_ONE_CASE = ("gpt-4o", "tekken")
"""Those that know upper and lower case of ASCII letters alone."""
_STRIPPING = re.compile("phi-?3", re.IGNORECASE)
"""llama.cpp strips spaces behind the special tokens of models whose general.name has this in it, and of no others ..."""
_UNSTRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""... except behind these, which it takes to be there."""

_PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_NO_REGEX = {**_PLAIN, "use_regex": False}


class Vocabulary(NamedTuple):
    """tokenizer.* metadata, and notes of what llama.cpp does otherwise."""

    metadata: dict[str, Any]
    notes: list[str]


def vocabulary(tokenizer: Tokenizer, vocab_size: int, pre_tokenizer: str, where: str) -> Vocabulary:
    """The metadata of `tokenizer` for an embedding of `vocab_size` rows; ids without a token become unused ones.

    `pre_tokenizer` is llama.cpp's name of the rule that splits texts, or 'auto' to find it. Raises SpecError for a
    tokenizer that llama.cpp has no equal of, ArtifactError when it has more tokens than the embedding.
    """
    notes = _without_row(tokenizer, vocab_size, where)
    rules = json.loads(tokenizer.core.to_str())
    model = rules["model"]
    if model["type"] != "BPE":
        raise SpecError(
            f"{where}: its tokenizer is of type {model['type']}", fix="hone exports byte-pair encodings (BPE) as GGUF"
        )
    steps = _flat(rules["normalizer"], "normalizers")
    splits = _flat(rules["pre_tokenizer"], "pretokenizers")
    pieces = any(step["type"] == "ByteLevel" for step in splits)
    make = _byte_level if pieces else _sentencepiece
    found = make(model, steps, splits, pre_tokenizer, where)
    spellings = [tokenizer.token_text(number) for number in range(vocab_size)]
    scores = None if pieces else _scores(model, spellings)
    types = [_type(tokenizer, model, number, text) for number, text in enumerate(spellings)]
    if scores is not None:
        _unescape(rules["added_tokens"], spellings, types, scores)
    shared = {
        "tokenizer.ggml.tokens": [text or f"[PAD{number}]" for number, text in enumerate(spellings)],
        "tokenizer.ggml.token_type": types,
        **({} if scores is None else {"tokenizer.ggml.scores": scores}),
    }
    notes += [*found.notes, *_stripped(rules["added_tokens"])]
    if more := tokenizer.eos_ids[len(_END_KEYS) :]:
        ends = ", ".join(map(tokenizer.token_text, more))
        notes.append(
            f"GGUF names {len(_END_KEYS)} tokens that end a text; llama.cpp ends at {ends} only where it knows their spelling"
        )
    return Vocabulary(found.metadata | shared | _special(tokenizer, model), notes)


def model_name(name: str, tokenizer: Tokenizer) -> str:
    """general.name, `name` where llama.cpp does with it what the tokenizer does: it strips spaces behind special tokens
    by this name (`_STRIPPING`)."""
    if _as_phi3(json.loads(tokenizer.core.to_str())["added_tokens"]):
        return name if _STRIPPING.search(name) else f"Phi-3 {name}"
    return _STRIPPING.sub("Phi 3", name)


def _as_phi3(added: list[dict[str, Any]]) -> bool:
    """Whether spaces are stripped behind the added tokens for which llama.cpp does so in models named Phi-3."""
    names = {token["content"] for token in added}
    behind = {token["content"] for token in added if token["rstrip"]}
    return {*_UNSTRIPPED, "</s>"} <= names and behind == names - _UNSTRIPPED and not any(one["lstrip"] for one in added)


def _stripped(added: list[dict[str, Any]]) -> list[str]:
    """A note of spaces that llama.cpp keeps and hone strips."""
    found = [token["content"] for token in added if token["lstrip"] or token["rstrip"]]
    if not found or _as_phi3(added):
        return []
    more = f" and {len(found) - 3} others" if len(found) > 3 else ""
    return [f"llama.cpp keeps spaces around {', '.join(found[:3])}{more}, which the tokenizer strips"]


def _without_row(tokenizer: Tokenizer, vocab_size: int, where: str) -> list[str]:
    """A note of added tokens behind the embedding's last row, which are left out.

    Raises ArtifactError where they are tokens that texts need.
    """
    beyond = [number for number in range(vocab_size, tokenizer.vocab_size) if tokenizer.token_text(number)]
    needed = {tokenizer.bos_id, *tokenizer.eos_ids}
    if any(number not in tokenizer.added_ids or number in needed for number in beyond):
        raise ArtifactError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {vocab_size} rows",
            fix="pair the weights with the tokenizer they were trained with",
        )
    if not beyond:
        return []
    return [f"left out, for want of a row in the embedding: {', '.join(map(tokenizer.token_text, beyond))}"]


def _unescape(added: list[dict[str, Any]], spellings: list[str], types: list[int], scores: list[float]) -> None:
    """Changes added tokens that are spelled with U+2581, which llama.cpp would print as it is and not find in texts.

    One that merges make is an ordinary token (Gemma's runs of spaces); another is spelled with spaces.
    """
    for token in added:
        number = token["id"]
        if number < len(types) and types[number] == USER_DEFINED and "\u2581" in token["content"]:
            if scores[number] > _NEVER and not token["normalized"]:
                types[number] = NORMAL
            else:
                spellings[number] = spellings[number].replace("\u2581", " ")


def _byte_level(model: dict[str, Any], steps: list, splits: list, named: str, where: str) -> Vocabulary:
    """Tokens spelled in GPT-2's alphabet of bytes."""
    notes = []
    if steps == [{"type": "NFC"}]:
        notes.append("llama.cpp applies no NFC: texts with decomposed letters get other tokens than in hone")
    elif steps:
        raise SpecError(
            f"{where}: llama.cpp has no normalizer {steps[0]['type']}", fix="export a model with another tokenizer"
        )
    whole = bool(model.get("ignore_merges"))
    name = _pre_tokenizer(splits, whole) if named == "auto" else named
    if name is None:
        raise SpecError(
            f"{where}: llama.cpp's name of this pre-tokenizer is not known: {json.dumps(splits):.300}",
            fix="set pre_tokenizer to the name that llama.cpp has for it (gpt-2, llama-bpe, qwen2, smollm ...)",
        )
    if whole != (name in _WHOLE_WORDS):
        notes.append(f"whole words are{' not' if whole else ''} looked up before merges in llama.cpp")
    if name in _ONE_CASE:
        notes.append(f"llama.cpp's {name} splits words of letters beyond ASCII where the tokenizer does not")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}, notes
    )


def _pre_tokenizer(splits: list[dict[str, Any]], whole: bool) -> str | None:
    """llama.cpp's name of a byte-level pre-tokenizer, `whole`: that looks whole words up; None when it is not known."""
    plain = [{name: value for name, value in one.items() if name != "trim_offsets"} for one in splits]
    if plain == [_PLAIN]:
        return "gpt-2"
    if plain == [{"type": "Digits", "individual_digits": True}, _PLAIN]:
        return "smollm"
    if len(plain) == 2 and plain[0]["type"] == "Split" and plain[1] == _NO_REGEX:
        split = plain[0]
        # What a split by these expressions leaves over is nothing: to remove the rest is to isolate what matches.
        known = {("Isolated", False), ("Removed", True)}
        regular = split["pattern"].get("Regex") if (split["behavior"], split["invert"]) in known else None
        names = _REGEXES.get(regular, {})
        return names.get(whole) or next(iter(names.values()), None)
    return None


def _sentencepiece(model: dict[str, Any], steps: list, splits: list, named: str, where: str) -> Vocabulary:
    """Tokens spelled with U+2581 for spaces and <0x0A> for bytes: SentencePiece's BPE as transformers converts it."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    no_split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if steps in ([prepend, space], [space]) and splits in ([], [no_split]):  # no spaces are left to split at (Gemma)
        prefix = len(steps) == 2
    elif not steps and len(splits) == 1 and splits[0]["type"] == "Metaspace" and splits[0]["replacement"] == "\u2581":
        prefix = splits[0].get("prepend_scheme", "always") != "never"
    else:
        raise SpecError(
            f"{where}: llama.cpp has no equal of this tokenizer: {json.dumps(steps + splits):.300}",
            fix="hone exports byte-level BPE, and BPE with byte fallback as SentencePiece has it",
        )
    if not model.get("byte_fallback"):
        raise SpecError(
            f"{where}: the tokenizer has no bytes for unknown letters, as llama.cpp needs",
            fix="hone exports byte-level BPE, and BPE with byte fallback as SentencePiece has it",
        )
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return Vocabulary(metadata, [])


def _scores(model: dict[str, Any], spellings: list[str]) -> list[float]:
    """SentencePiece joins the neighbours whose union has the highest score: the earlier a merge, the higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(first + second, rank)
    return [-float(ranks[text]) if text in ranks else _NEVER for text in spellings]


def _type(tokenizer: Tokenizer, model: dict[str, Any], number: int, text: str) -> int:
    if not text:
        return UNUSED
    if text == model.get("unk_token"):
        return UNKNOWN
    if number in tokenizer.special_ids:
        return CONTROL
    if number in tokenizer.added_ids:
        return USER_DEFINED
    return BYTE if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") else NORMAL


def _special(tokenizer: Tokenizer, model: dict[str, Any]) -> dict[str, Any]:
    """The ids of special tokens, whether they are added to a text, and the chat template."""
    found: dict[str, Any] = {}
    if tokenizer.bos_id is not None:
        found["bos_token_id"] = tokenizer.bos_id
    found |= dict(zip(_END_KEYS, tokenizer.eos_ids, strict=False))
    unknown = tokenizer.core.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    if unknown is not None:
        found["unknown_token_id"] = unknown
    ids = tokenizer.encode("a")
    found["add_bos_token"] = tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.start_ids
    found["add_eos_token"] = len(ids) > 1 and ids[-1] in tokenizer.eos_ids
    named = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    return named if tokenizer.chat_template is None else named | {"tokenizer.chat_template": tokenizer.chat_template}


def _flat(part: dict[str, Any] | None, nested: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list of steps."""
    if part is None:
        return []
    return [step for one in part[nested] for step in _flat(one, nested)] if part["type"] == "Sequence" else [part]
