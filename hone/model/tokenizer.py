"""The tokenizer of a Hugging Face folder: encode, decode, chat template, and each token's exact bytes."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from hone.base.durable import kind_of
from hone.base.errors import ArtifactError, SpecError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer that `load_tokenizer` returns. Threads may share it."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        template_tokens: dict[str, str] | None = None,
    ) -> None:
        self.core = core
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self._template = chat_template
        self._template_tokens = template_tokens or {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return self._vocab_size

    @cached_property
    def _vocab_size(self) -> int:
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` with those of its post-processor (often a leading BOS)."""
        try:
            return self.core.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # half a surrogate pair: Python decodes invalid UTF-8 on the command line to these
            raise SpecError(f"{text!r:.80} is not valid Unicode text", fix="give text in UTF-8") from None

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        return [one.ids for one in self.core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self.core.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token ('Ġthe', '▁the', '<0x0A>'); '' for an id it does not have."""
        return self.core.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token inside a text; for an added token its spelling, for an unknown id b''.

        A leading space is kept, so joining the bytes of a text's tokens gives the text (and, with sentencepiece
        vocabularies, the one space they put in front of it).
        """
        text = self.token_text(token_id)
        if token_id in self._added:
            return text.encode()
        if self._byte_level:
            return bytes(_BYTE_OF.get(letter, 0x3F) for letter in text)
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """What `encode` puts before a text: usually the token that begins a sequence, or nothing."""
        found = self.core.encode("a")
        return tuple(number for number, _ in takewhile(itemgetter(1), zip(found.ids, found.special_tokens_mask)))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special_ids

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that were added to the vocabulary, special ones among them."""
        return self._added_ids

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._added)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return self.core.get_added_tokens_decoder()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self._added.items() if token.special)

    @cached_property
    def _byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's alphabet of 256 printable letters, one a byte."""
        parts = (self.core.pre_tokenizer, self.core.decoder)
        return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)

    @cached_property
    def identity(self) -> str:
        """A digest of the rules that map texts to ids; equal for two tokenizers exactly when these rules are equal.

        Vocabulary, merges, normalizer, pre-tokenizer and added tokens count. The post-processor, padding, truncation,
        the decoder and the chat template do not: transformers rewrites them when it saves a tokenizer.
        """
        rules = json.loads(self.core.to_str())
        counted = {
            "model": _model_rules(rules["model"]),
            "normalizer": _steps(rules["normalizer"], "normalizers"),
            "pre_tokenizer": _steps(rules["pre_tokenizer"], "pretokenizers"),
            # `special` of an added token affects `decode`, not the ids of a text.
            "added_tokens": sorted(
                (
                    {name: value for name, value in token.items() if name != "special"}
                    for token in rules["added_tokens"]
                ),
                key=lambda token: token["id"],
            ),
        }
        written = json.dumps(counted, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(written.encode("utf8", "surrogatepass")).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template."""
        return self._template

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template (Jinja source)."""
        return Tokenizer(
            self.core,
            bos_id=self.bos_id,
            eos_ids=self.eos_ids,
            chat_template=template,
            template_tokens=self._template_tokens,
        )

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        marks: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for `messages` ({"role", "content"}) by the model's own template, run in a sandbox.

        `variables` (tools, enable_thinking, ...) are passed to the template. The text holds its special tokens: encode
        it with add_special_tokens=False. With `marks` what is in {% generation %} stands between U+E002 and U+E003.
        Raises SpecError when there is no template or the template refuses.
        """
        if self._template is None:
            raise SpecError(
                "this model has no chat template", fix="use completions instead of chat, or choose a chat model"
            )
        template = self._marked if marks else self._compiled
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **{**self._template_tokens, **variables}
            )
        except MemoryError:
            raise
        except Exception as error:  # any error of a template is one of the model's or the messages'
            raise SpecError(
                f"the chat template refuses these messages: {error}",
                fix="send the roles, fields and order that the model's template expects",
            ) from None

    @cached_property
    def _compiled(self) -> Any:
        return self._compile(marks=False)

    @cached_property
    def _marked(self) -> Any:
        return self._compile(marks=True)

    def _compile(self, *, marks: bool) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag(marks)]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._template)
        except jinja2.TemplateSyntaxError as error:
            raise ArtifactError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                fix="correct chat_template in tokenizer_config.json",
            ) from None


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, with BOS, EOS and chat template from its config files.

    EOS ids come from generation_config.json, config.json and tokenizer_config.json together.
    Raises ArtifactError when there is no tokenizer.json or a file is corrupt.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists() and (folder / "tokenizer.model").exists():
        raise ArtifactError(
            f"{folder} has a SentencePiece tokenizer.model and no tokenizer.json, the file that hone reads",
            fix=f"transformers writes one: AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')",
        )
    if not path.exists():
        raise ArtifactError(
            f"{folder} has no tokenizer.json",
            fix="copy the tokenizer files of the model it was made from into it (tokenizer.json, tokenizer_config.json)",
        )
    core = _read(path)
    core.no_truncation()
    core.no_padding()
    settings = _optional(folder / "special_tokens_map.json") | _optional(folder / "tokenizer_config.json")
    tokens = {
        name: _spelling(settings[name], f"{folder}: {name}")
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if settings.get(name)
    }
    bos = core.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
    ends: list[int] = []
    for values in (_optional(folder / "generation_config.json"), _optional(folder / "config.json")):
        found = values.get("eos_token_id")
        ends += [] if found is None else [found] if isinstance(found, int) else list(found)
        bos = values.get("bos_token_id") if bos is None else bos
    if "eos_token" in tokens and core.token_to_id(tokens["eos_token"]) is not None:
        ends.append(core.token_to_id(tokens["eos_token"]))
    return Tokenizer(
        core,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(ends)),
        chat_template=_chat_template(folder, settings),
        template_tokens=tokens,
    )


def identity_of(folder: Path | str) -> str | None:
    """`Tokenizer.identity` of the tokenizer in a folder; None when there is no tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    return Tokenizer(_read(path)).identity if path.exists() else None


def tokenizers_differ(one: Path | str, other: Path | str) -> bool:
    """Whether two folders have tokenizers that give some text different ids; False when one has none to compare."""
    paths = [Path(folder) / "tokenizer.json" for folder in (one, other)]
    if not all(path.exists() for path in paths) or paths[0].read_bytes() == paths[1].read_bytes():
        return False
    return identity_of(one) != identity_of(other)


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        if kind := kind_of(path):
            raise OSError(f"it is {kind}, not a file")
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every error
        raise ArtifactError(f"{path} is corrupt: {error}", fix="copy it again from its source") from None


def _model_rules(model: dict[str, Any]) -> dict[str, Any]:
    """The options of a tokenizer's model that are set, with merges as pairs: 'a b' equals ['a', 'b']."""
    options = {name: value for name, value in model.items() if value not in (None, "") and value is not False}
    if "merges" in model:
        options["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return options


def _steps(part: dict[str, Any] | None, nested: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list of steps, without options that affect offsets only."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[nested] for step in _steps(one, nested)]
    return [{name: value for name, value in part.items() if name != "trim_offsets"}]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (the one named 'default' of several)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf8")
    template = settings.get("chat_template")
    try:
        if isinstance(template, list):
            named = {row["name"]: row["template"] for row in template}
            template = named.get("default", next(iter(named.values()), None))
    except (KeyError, TypeError):
        raise _no_template(folder, "a list whose entries are not {name, template}") from None
    if template is not None and not isinstance(template, str):
        raise _no_template(folder, f"{template!r:.80}, not a text")
    return template


def _no_template(folder: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"chat_template in {folder / 'tokenizer_config.json'} is {what}",
        fix="write the template as a text, or as a list of {name, template}",
    )


def _optional(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} when there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is corrupt: {error}", fix="copy it again from its source") from None
    return values if isinstance(values, dict) else {}


def _spelling(token: Any, where: str) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ArtifactError(f"{where} is {token!r:.80}", fix="write the token's text there")
    return text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML letters, which no chat template wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _generation_tag(marks: bool) -> type:
    """{% generation %}...{% endgeneration %}: the assistant's text, for training; rendered as its body, with `marks` around it."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marks:
                return body
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in ("\ue002", "\ue003"))
            return [begin, *body, end]

    return Generation


def _letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _letters()
