"""Chat templates: the tokenizer's own, a file's, or a short one for models that have none."""

from __future__ import annotations

from pathlib import Path

from hone.base.errors import SpecError

ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Role headers as plain text, and the end-of-text token after every message, as Zephyr has them: it needs no token that the
vocabulary lacks, and a server stops at the end of an answer."""
_NAMED = {"zephyr": ZEPHYR}


def template_of(name: str) -> str:
    """The Jinja source of the template `name`, a word of `_NAMED` or a file. Raises SpecError when there is no such file."""
    if name in _NAMED:
        return _NAMED[name]
    try:
        return Path(name).expanduser().read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"tokenizer.chat.template {name}: {getattr(error, 'strerror', None) or error}",
            fix=f"give a Jinja file, or one of {', '.join(_NAMED)}",
        ) from None
