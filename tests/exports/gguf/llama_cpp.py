"""llama.cpp itself as the oracle: the library inside the package xllamacpp, called through its C interface (include/llama.h)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

_SPARE = 1024
"""Bytes given to the two structs of parameters, which are larger in no version; their fields are left at their defaults,
but for the first of the context's, its length."""


class _Params(ctypes.Structure):
    _fields_ = (("fields", ctypes.c_uint32 * (_SPARE // 4)),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("num_sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_say_nothing = _QUIET(lambda level, text, data: None)


def library() -> ctypes.CDLL:
    """The library; the test skips where the package is not installed."""
    package = pytest.importorskip("xllamacpp")
    found = ctypes.CDLL(next(str(path) for path in Path(package.__file__).parent.glob("xllamacpp*.so")))
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("llama_model_default_params", _Params, ()),
        ("llama_context_default_params", _Params, ()),
        ("llama_model_load_from_file", pointer, (ctypes.c_char_p, _Params)),
        ("llama_init_from_model", pointer, (pointer, _Params)),
        ("llama_model_get_vocab", pointer, (pointer,)),
        ("llama_vocab_n_tokens", ctypes.c_int32, (pointer,)),
        ("llama_batch_init", _Batch, (ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)),
        ("llama_batch_free", None, (_Batch,)),
        ("llama_decode", ctypes.c_int32, (pointer, _Batch)),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (pointer, ctypes.c_int32)),
        ("llama_set_n_threads", None, (pointer, ctypes.c_int32, ctypes.c_int32)),
        ("llama_free", None, (pointer,)),
        ("llama_model_free", None, (pointer,)),
        ("llama_log_set", None, (_QUIET, pointer)),
        ("ggml_quantize_chunk", ctypes.c_size_t, (ctypes.c_int, pointer, pointer, *(ctypes.c_int64,) * 3, pointer)),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_tokenize.argtypes = (
        *(pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32),
        *(ctypes.c_bool, ctypes.c_bool),
    )
    found.llama_log_set(_say_nothing, None)
    return found


class LlamaCpp:
    """One model of a GGUF file, loaded by llama.cpp."""

    def __init__(self, path: Path, seq_len: int = 512) -> None:
        self.lib = library()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        assert self.model, f"llama.cpp does not load {path}"
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.vocab)
        self.seq_len = seq_len

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 [S, V]: after each of the tokens, which begin a sequence."""
        lib, params = self.lib, self.lib.llama_context_default_params()
        params.fields[0] = self.seq_len
        context = lib.llama_init_from_model(self.model, params)
        assert context, "llama.cpp makes no context"
        lib.llama_set_n_threads(context, 1, 1)
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.num_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.position[place], batch.logits[place] = token, place, 1
            batch.num_sequences[place], batch.sequence[place][0] = 1, 0
        assert lib.llama_decode(context, batch) == 0, "llama.cpp computes nothing"
        rows = [
            np.ctypeslib.as_array(lib.llama_get_logits_ith(context, place), (self.vocab_size,)).copy()
            for place in range(len(tokens))
        ]
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return np.stack(rows)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Its token ids of a text, with those that it adds."""
        encoded = text.encode()
        found = (ctypes.c_int32 * (len(encoded) + 16))()
        count = self.lib.llama_tokenize(self.vocab, encoded, len(encoded), found, len(found), True, special)
        assert count >= 0, "the buffer is too small"
        return list(found[:count])

    def close(self) -> None:
        self.lib.llama_model_free(self.model)


def quantize(weights: np.ndarray, number: int, row_bytes: int) -> np.ndarray:
    """ggml's own blocks uint8 [N, bytes of a row] of weights float32 [N, K] in type `number`."""
    out = np.empty((len(weights), row_bytes), np.uint8)
    library().ggml_quantize_chunk(number, weights.ctypes.data, out.ctypes.data, 0, *weights.shape, None)
    return out
