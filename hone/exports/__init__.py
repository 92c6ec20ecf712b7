"""Exports: model folders as single files of other programs."""

from __future__ import annotations

from hone.base.table import Table

EXPORTS = Table("export format", {"gguf": "hone.exports.gguf.spec:GGUF"})
