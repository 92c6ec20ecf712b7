"""Mail: the text of messages (.eml) and mailboxes (.mbox), with the subject before it; attachments are noted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import IO

from hone.feed.files.kinds import ending_of
from hone.feed.files.listing import File
from hone.feed.files.streams import Salvage, Unreadable, open_stream, read_whole
from hone.readers.documents import Fault, Noted, Options, RawText, poisoned
from hone.readers.encodings import decode_plain
from hone.readers.pages import Fast, page_text

MAX_MESSAGE_BYTES = 64 << 20
_FROM = re.compile(rb"From \S+.*\d\d:\d\d")
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
_STEP = 1 << 20


def read_eml(file: File, options: Options) -> Iterator[RawText | Fault | Noted]:
    """One message."""
    yield from _message(read_whole(file), options)


def read_mbox(file: File, options: Options) -> Iterator[RawText | Fault | Noted]:
    """The messages of a mailbox, each after a line 'From ...'. A Fault for each without text."""
    with open_stream(file) as stream:
        for number, raw in enumerate(_messages(stream)):
            if raw is None:
                yield Fault("too_large", f"message {number}", MAX_MESSAGE_BYTES, numbered=True)
            else:
                yield from _message(raw, options)


def _messages(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The bytes of each message, None for one that is too large. Raises Unreadable for a file that does not begin with one."""
    salvage = Salvage(stream)  # type: ignore[arg-type]
    lines: list[bytes] = []
    size, begun, blank = 0, False, True
    for line in _lines(salvage):
        if blank and _FROM.match(line):
            if begun:
                yield _QUOTED_FROM.sub(rb"\1", b"".join(lines)) if size <= MAX_MESSAGE_BYTES else None
            lines, size, begun, blank = [], 0, True, False
            continue
        if not begun:
            if line.strip():
                raise Unreadable("bad_mbox", "it does not begin with a line 'From ...'")
            continue
        blank = not line.strip()
        size += len(line)
        if size <= MAX_MESSAGE_BYTES:
            lines.append(line)
    if begun:
        yield _QUOTED_FROM.sub(rb"\1", b"".join(lines)) if size <= MAX_MESSAGE_BYTES else None


def _lines(stream: Salvage) -> Iterator[bytes]:
    held = b""
    while chunk := stream.read(_STEP):
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if len(held) > MAX_MESSAGE_BYTES:
            raise Unreadable("row_too_long", "")
    if held:
        yield held


def _message(raw: bytes, options: Options) -> Iterator[RawText | Fault | Noted]:
    try:
        message = message_from_bytes(raw, policy=policy.default)
        subject = " ".join(str(message.get("subject", "")).split())
        texts = {"text/plain": [], "text/html": []}
        attached = []
        for part in message.walk():
            kind = part.get_content_type()
            if part.is_multipart():
                continue
            if part.get_content_disposition() == "attachment" or kind not in texts:
                name = part.get_filename() or ""
                attached.append(Noted(f"attachment {ending_of(name) if name else kind}"))
                continue
            texts[kind].append(_text(part, kind, options))
    except Unreadable as stop:
        yield Fault(*stop.args, len(raw), numbered=True)
        return
    except BaseException as error:
        if not poisoned(error):
            raise
        yield Fault("bad_message", f"{type(error).__name__} {error}", len(raw), numbered=True)
        return
    yield from attached
    if not message.keys():
        yield Fault("bad_message", raw[:200].decode("latin-1"), len(raw), numbered=True)
        return
    body = "\n\n".join(text.strip() for text in texts["text/plain"] or texts["text/html"] if text.strip())
    yield RawText(f"{subject}\n\n{body}" if subject and body else body or subject)


def _text(part: EmailMessage, kind: str, options: Options) -> str:
    raw = part.get_payload(decode=True) or b""
    charset = part.get_content_charset()
    if kind == "text/html":
        return page_text(raw, options.extractor or Fast(), charset)
    try:
        return decode_plain(raw, charset)
    except (UnicodeDecodeError, LookupError):
        raise Unreadable("wrong_encoding", raw[:200].decode("latin-1")) from None
