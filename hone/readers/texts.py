"""Texts: plain text files as documents, decoded one by one, so that bad bytes only cost their own document."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from hone.feed.files.listing import File
from hone.feed.files.streams import Salvage, open_stream
from hone.readers.documents import SAMPLE_CHARS, Fault, Options, RawText
from hone.readers.encodings import BAD, Decoder, decoder_of

END_OF_TEXT = "<|endoftext|>"
"""Separates documents in text files (a common dump format) and ends each one in the packed tokens."""
_CHUNK_BYTES = 1 << 20
_SHOWN_BEFORE = 100


def read_text(file: File, options: Options) -> Iterator[RawText | Fault]:
    """Documents separated by END_OF_TEXT; one longer than `max_document_chars` is cut, at a blank line if possible.

    A Fault for each document with undecodable bytes. Of a truncated compressed stream, what could be
    decoded is returned, then EOFError raised.
    """
    with open_stream(file) as buffered:
        stream = Salvage(buffered)
        first = stream.read(_CHUNK_BYTES)
        decoder, begin = decoder_of(first[:4], options.encoding)
        documents = _Documents(decoder, options.max_document_chars)
        mark = END_OF_TEXT.encode(decoder.encoding)
        try:
            for raw, ends in _parted(_chunks(first[begin:], stream), mark, len(mark) // len(END_OF_TEXT)):
                yield from documents.add(raw, ends)
        except EOFError:
            yield from documents.broken_off()
            raise


def pieces(text: str, most: int) -> Iterator[RawText]:
    """`text` as documents of at most `most` characters, cut as by `read_text`; none for blank text."""
    begin = 0
    while len(text) - begin > most:
        end, following = _cut(text, begin, most)
        yield RawText(text[begin:end])
        begin = following
    if text[begin:].strip():
        yield RawText(text[begin:])


def _chunks(first: bytes, stream: Salvage) -> Iterator[bytes]:
    yield first
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def _parted(chunks: Iterable[bytes], mark: bytes, unit: int) -> Iterator[tuple[bytes, bool]]:
    """(bytes, whether a document ends after them), without the separators, which begin at multiples of `unit` bytes."""
    held = b""
    try:
        for chunk in chunks:
            raw = held + chunk
            begin = 0
            while (end := _find(raw, mark, begin, unit)) >= 0:
                yield raw[begin:end], True
                begin = end + len(mark)
            kept = max((len(raw) - len(mark)) // unit * unit, begin)  # a separator may begin after it
            if kept > begin:
                yield raw[begin:kept], False
            held = raw[kept:]
    except EOFError:
        yield held, False
        raise
    yield held, True


def _find(raw: bytes, mark: bytes, begin: int, unit: int) -> int:
    """The offset of the next separator; -1 without one."""
    end = raw.find(mark, begin)
    while end % unit and end >= 0:
        end = raw.find(mark, end + 1)
    return end


class _Documents:
    """Assembles documents from pieces of bytes, and cuts long ones."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        self._decoder, self._most = decoder, most
        self._lines = io.IncrementalNewlineDecoder(None, True)
        self._begin()

    def _begin(self) -> None:
        self._texts: list[str] = []
        self._num_chars = self._num_bytes = 0
        self._is_cut = False

    def add(self, raw: bytes, ends: bool) -> Iterator[RawText | Fault]:
        """Documents complete after `raw`; with `ends`, also the rest of the current one."""
        self._num_bytes += len(raw)
        text = self._lines.decode(self._decoder.decode(raw, ends), ends)
        self._texts.append(text)
        self._num_chars += len(text)
        if self._num_chars > self._most:
            whole, begin = "".join(self._texts), 0
            self._is_cut = True
            while len(whole) - begin > self._most:
                end, following = _cut(whole, begin, self._most)
                yield self._piece(whole[begin:end])
                begin = following
            self._texts, self._num_chars = [whole[begin:]], len(whole) - begin
        if ends:
            yield from self.rest()

    def rest(self) -> Iterator[RawText | Fault]:
        """The current document so far, unless blank; then starts the next one."""
        text = "".join(self._texts)
        if text.strip():
            yield self._piece(text)
        self._begin()

    def broken_off(self) -> Iterator[RawText | Fault]:
        """The current document so far, at the truncation; without a character that was cut in two."""
        text = self._lines.decode(self._decoder.decode(b"", True), True)
        self._texts.append(text.rstrip(BAD))
        yield from self.rest()

    def _piece(self, text: str) -> RawText | Fault:
        at = text.find(BAD)
        if at < 0:
            return RawText(text)
        size = len(text.encode(self._decoder.encoding, "replace")) if self._is_cut else self._num_bytes
        begin = max(at - _SHOWN_BEFORE, 0)
        shown = text[begin : begin + SAMPLE_CHARS].replace(BAD, "\ufffd")
        return Fault("wrong_encoding", shown, size, numbered=True)


def _cut(text: str, begin: int, most: int) -> tuple[int, int]:
    """(end, start of the next) of a piece of the text from `begin` on, of at most `most` characters.

    Cut at the last blank line, line end or space in its last half, which is removed.
    """
    for border in ("\n\n", "\n", " "):
        place = text.rfind(border, begin + most // 2, begin + most)
        if place >= 0:
            return place, place + len(border)
    return begin + most, begin + most
