"""The model of a folder, run in this process: by the engine, or layer by layer where the engine does not serve it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from hone.base.errors import MachineError, SpecError
from hone.base.run import Run
from hone.cli.chat.conversation import Answer, Messages
from hone.cli.chat.spec import ChatSpec
from hone.model.folder import model_folder
from hone.model.hf import Checkpoint, load
from hone.model.incremental import grow
from hone.model.tokenizer import Tokenizer
from hone.serve.detokenize import TextStream
from hone.serve.engine import Engine
from hone.serve.http.defaults import generation_defaults
from hone.serve.http.texts.opening import read_tokenizer
from hone.serve.paging.cache import first_unserved
from hone.serve.request import Request, SamplingParams
from hone.serve.spec import EngineSpec

_ID = "chat"


def open_local(where: str, spec: ChatSpec, run: Run) -> LocalModel:
    """The model of a folder. Raises HoneError for one that cannot be talked to."""
    folder = model_folder(where)
    tokenizer = read_tokenizer(folder, spec.chat_template)
    if tokenizer is None:
        raise SpecError(
            f"{folder} has no tokenizer.json, and a chat is of texts", fix="copy the tokenizer's files into it"
        )
    unserved = first_unserved(Checkpoint(folder).config)
    kind: type[LocalModel] = EngineModel if unserved is None else StateModel
    name = folder.resolve().name if where == str(folder) else where
    model = kind(name, folder, tokenizer, spec)
    model.open(spec.engine, run.device, "" if unserved is None else unserved[1])
    return model


class LocalModel:
    """What both kinds share: templates, tokens, defaults. Between tokens an answer may be ended; a step is never interrupted."""

    interruptible = False
    needs_limit = True
    max_model_len: int | None

    def __init__(self, name: str, folder: Path, tokenizer: Tokenizer, spec: ChatSpec) -> None:
        self.name, self.folder, self.tokenizer = name, folder, tokenizer
        self.defaults = generation_defaults(folder, spec.generation_config)
        self.chat = tokenizer.has_chat_template

    def open(self, spec: EngineSpec, device: str, mixer: str) -> None:
        """Loads the weights. `mixer` is one that the engine does not serve, if there is any."""
        raise NotImplementedError

    def count(self, prompt: Messages | str) -> int:
        """Tokens of a prompt."""
        return len(self.ids(prompt))

    def ids(self, prompt: Messages | str) -> list[int]:
        """The tokens of a prompt; messages go through the chat template, which writes the special ones."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode(self.tokenizer.chat(prompt), add_special_tokens=False)

    def params(self, given: SamplingParams, max_tokens: int | None) -> SamplingParams:
        """`given` with the model's own defaults under it."""
        set_here = {name: getattr(given, name) for name in given.model_fields_set}
        return SamplingParams.model_validate({**self.defaults.values, **set_here, "max_tokens": max_tokens})

    def pieces(self, prompt: Messages | str, given: SamplingParams, max_tokens: int | None) -> Iterator[Answer]:
        """The answer after every step. Closing the iterator ends it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends other processes, if there are any."""


class EngineModel(LocalModel):
    """An engine, by default for one sequence at a time; its prefix cache has the pages of earlier turns."""

    def open(self, spec: EngineSpec, device: str, mixer: str) -> None:
        if spec.max_num_seqs is None:
            spec = spec.model_copy(update={"max_num_seqs": 1})
        self.engine = Engine(self.folder, spec, tokenizer=self.tokenizer, device=device)
        self.max_model_len = self.engine.max_model_len

    def pieces(self, prompt: Messages | str, given: SamplingParams, max_tokens: int | None) -> Iterator[Answer]:
        answer, started = Answer(), time.monotonic()
        self.engine.add(Request(_ID, self.ids(prompt), self.params(given, max_tokens)))
        try:
            while answer.finish is None:
                for output in self.engine.step():
                    answer.last_s = time.monotonic() - started
                    answer.first_s = answer.first_s or answer.last_s
                    answer.text += output.text
                    answer.finish = output.finish
                    answer.num_tokens = (answer.num_tokens or 0) + len(output.tokens)
                    answer.num_prompt, answer.num_cached = output.num_prompt_tokens, output.num_cached_tokens
                    if output.finish == "error":
                        raise MachineError(f"the engine failed on this request: {output.error}", fix="ask again")
                yield answer
        finally:
            self.engine.abort(_ID)
            while self.engine.has_work:  # what an abort leaves to deliver
                self.engine.step()

    def close(self) -> None:
        self.engine.close()


class StateModel(LocalModel):
    """A model with recurrent states, which the engine does not serve: every turn reads its whole prompt."""

    def open(self, spec: EngineSpec, device: str, mixer: str) -> None:
        if spec != EngineSpec():
            raise SpecError(
                f"engine is given, and no engine serves layers of mixer '{mixer}'", fix="leave --engine.* out"
            )
        self._mixer, self._device = mixer, device
        self._model = load(self.folder, device=device).eval()
        self._ends = {*self._model.config.eos_token_ids, *self.tokenizer.eos_ids}
        self.max_model_len = self._model.config.max_seq_len

    def pieces(self, prompt: Messages | str, given: SamplingParams, max_tokens: int | None) -> Iterator[Answer]:
        answer, started = Answer(), time.monotonic()
        how = self.params(given, max_tokens).without_engine(self._mixer)
        ends = {*how.pop("stop_tokens"), *(() if how.pop("ignore_eos") else self._ends)}
        ids = self.ids(prompt)
        text = TextStream(self.tokenizer, ids)
        answer.num_prompt, answer.num_cached, answer.num_tokens = len(ids), 0, 0
        tokens = torch.tensor([ids], dtype=torch.int64, device=self._device)
        with closing(grow(self._model, tokens, **how)) as grown:
            for chosen in grown:
                token = int(chosen[0])
                answer.num_tokens += 1
                answer.last_s = time.monotonic() - started
                answer.first_s = answer.first_s or answer.last_s
                if token in ends:
                    answer.finish = "stop"
                    break
                answer.text += text.push(token)
                yield answer
        answer.text += text.finish()
        answer.finish = answer.finish or "length"
        yield answer
