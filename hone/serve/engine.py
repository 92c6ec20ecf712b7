"""The engine: requests in, tokens and text out, one step at a time. In Python: `hone.Engine(folder).generate(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from hone.base.errors import FitError, SpecError
from hone.base.figure import human_bytes
from hone.base.run import Run
from hone.model.decoder import Decoder
from hone.model.tokenizer import Tokenizer
from hone.serve.choosing import Chooser, Entry
from hone.serve.detokenize import TextStream
from hone.serve.opening import open_parts
from hone.serve.request import BusyError, Completion, Output, Request, SamplingParams, joined
from hone.serve.runner import SeqResult
from hone.serve.sampler import Chosen
from hone.serve.scheduler import Scheduler, Seq, Work
from hone.serve.sizing import step_threads
from hone.serve.spec import EngineSpec
from hone.serve.step import StepInput
from hone.serve.step_builder import StepBuilder

__all__ = ["BusyError", "Engine", "EngineSpec"]


class Engine:
    """Serves one model. Not thread-safe: one thread calls `add`, `abort` and `step`.

    `model` is a `Decoder` or a Hugging Face folder (quantized ones too), whose tokenizer is read unless one is given.
    Without any tokenizer prompts are token ids and outputs have no text. `device` must hold a given Decoder already.
    """

    def __init__(
        self,
        model: Decoder | Path | str,
        spec: EngineSpec | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        draft: Decoder | Path | str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        parts = open_parts(model, spec or EngineSpec(), tokenizer, draft, self.device)
        self.spec = spec = parts.spec
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.pool, self.runner, self.proposer = parts.pool, parts.runner, parts.proposer
        self.max_model_len, self._note = parts.max_model_len, parts.note
        self.max_waiting = spec.max_waiting
        """Requests that may wait; more are rejected."""
        config = self.model.config
        self.eos_ids = frozenset((*config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ())))
        assert spec.max_num_seqs is not None and spec.max_num_batched_tokens is not None, "sizes are filled in"
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            batching=spec.batching,
            lookahead=parts.drafter.num_tokens if parts.drafter else 0,
            lookahead_seqs=parts.drafter.max_num_seqs if parts.drafter else 0,
        )
        self._builder = StepBuilder(spec.block_size)
        self._num_params = config.num_params
        self._seqs: dict[str, Seq] = {}
        self._arrivals = count()
        self._outputs: list[
            Output
        ] = []  # outputs of aborts, and of other requests during `generate`, for the next step
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_drafted = self._num_accepted = 0

    @property
    def sizes(self) -> str:
        """The engine's sizes in one line, including those derived from the device."""
        spec, pool, dtype = self.spec, self.pool, str(self.runner.cache.dtype).removeprefix("torch.")
        return (
            f"max_num_seqs={spec.max_num_seqs} max_num_batched_tokens={spec.max_num_batched_tokens} "
            f"max_model_len={self.max_model_len}; KV cache of {human_bytes(self.cache_bytes)} in {dtype}: "
            f"{pool.num_pages} pages of {pool.block_size} tokens{self._note and f'; {self._note}'}"
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, including the draft model's."""
        guesser = self.runner.guesser
        return self.runner.cache.num_bytes + (guesser.cache.num_bytes if guesser else 0)

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or an output undelivered."""
        return bool(self._seqs or self._outputs)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises SpecError for impossible parameters or tokens, FitError for a prompt longer than `max_model_len` allows,
        BusyError when `max_waiting` requests wait already.
        """
        params, vocab_size = request.params, self.model.config.vocab_size
        if request.id in self._seqs:
            raise SpecError(f"a request with id '{request.id}' is running", fix="give every request its own id")
        if not request.prompt:
            raise SpecError("the prompt has no tokens", fix="send at least one token")
        for name, tokens in (
            ("prompt", request.prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise SpecError(
                        f"{name} holds token {token}, the vocabulary has {vocab_size}",
                        fix=f"use token ids from 0 to {vocab_size - 1}",
                    )
        longest = self.max_model_len - (params.max_tokens > 0)
        if len(request.prompt) > longest:
            raise FitError(
                f"the prompt has {len(request.prompt)} tokens, the maximum context length is {self.max_model_len} "
                "tokens, output included",
                fix=f"shorten the prompt to {longest} tokens or less",
            )
        if params.stop and self.tokenizer is None:
            raise SpecError("stop texts need a tokenizer", fix="use stop_token_ids, or give the engine a tokenizer")
        if self.scheduler.num_waiting >= self.max_waiting:
            raise BusyError(f"{self.scheduler.num_waiting} requests wait already", fix="try again in a moment")
        self._seqs[request.id] = seq = self._seq(request)
        self.scheduler.add(seq)

    def _seq(self, request: Request) -> Seq:
        params = request.params
        seq = Seq(request, next(self._arrivals), min(len(request.prompt) + params.max_tokens, self.max_model_len))
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids))
        seq.entry = Entry(Chooser(params, ends), seq.tokens, seq.num_prompt)
        seq.speculates = self.proposer is not None and not seq.entry.chooser.penalized
        if params.prompt_logprobs is not None:
            seq.prompt_logprobs = [None] * seq.num_prompt
        if self.tokenizer is not None:
            seq.stream = TextStream(
                self.tokenizer,
                request.prompt,
                params.stop,
                include_stop=params.include_stop,
                min_tokens=params.min_tokens,
            )
        return seq

    def abort(self, request_id: str) -> None:
        """Ends a waiting or running request; the next step returns its last output (finish "abort"). Ignores unknown ids."""
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._outputs.append(self._end(seq, self._output(seq), "abort"))

    def step(self) -> list[Output]:
        """Runs one step; returns the new outputs, at most one per request.

        They include outputs of other requests computed during `generate`: each is returned exactly once.
        """
        held = bool(self._outputs)
        work, fresh = self.scheduler.schedule()
        if not work:
            assert not self._seqs, f"{len(self._seqs)} requests wait and nothing can run"
            return self._deliver(held)
        self._num_steps += 1
        if self.proposer is not None:
            self.proposer.propose(work)
        step, work, broken = self._input(work, fresh)
        with self._threads(len(step.batch.tokens)):
            results = self.runner.run(step)
        for item, result in [*zip(work, results, strict=True), *broken]:
            output = self._finish_item(item, result)
            if output is not None:
                self._outputs.append(output)
        return self._deliver(held)

    def _input(self, work: list[Work], fresh: list[int]) -> tuple[StepInput, list[Work], list[tuple[Work, SeqResult]]]:
        """The step's input, the work that it contains, and the work left out because of an error in its sequence's state."""
        try:
            return self._builder.build(work, fresh), work, []
        except Exception:
            broken = [(item, error) for item in work if (error := self._mistake(item)) is not None]
            if not broken:
                raise
        bad = [item for item, _ in broken]
        good = [item for item in work if item not in bad]
        return self._builder.build(good, fresh), good, [(item, SeqResult(error=error)) for item, error in broken]

    def _mistake(self, item: Work) -> str | None:
        """The error of building a step of this item alone, None without one."""
        try:
            StepBuilder(self.spec.block_size).build([item], ())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _deliver(self, held: bool) -> list[Output]:
        """All undelivered outputs. `held`: some are older than this step, so a request may have several."""
        outputs, self._outputs = self._outputs, []
        return joined(outputs) if held else outputs

    @contextmanager
    def _threads(self, num_tokens: int) -> Iterator[None]:
        """Sets the CPU threads of a step of `num_tokens`, and restores the process's number afterwards.

        Threads synchronize after every operation. In small steps that costs more than the parallel work saves, and a time
        slice per operation when another process uses the core.
        """
        before = torch.get_num_threads()
        wanted = step_threads(self.spec, self._num_params, num_tokens, before) if self.device.type == "cpu" else before
        if wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _finish_item(self, item: Work, result: SeqResult) -> Output | None:
        """Applies a step's result to its sequence; an error here ends this sequence only."""
        seq = item.seq
        error = result.error
        if error is None:
            try:
                return self._advance(item, result)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        self.pool.forget(seq.pages)
        return self._end(seq, self._output(seq), "error", error=error)

    def _advance(self, item: Work, result: SeqResult) -> Output | None:
        seq, computed = item.seq, item.start + item.count
        if self.proposer is not None:
            num_kept = max(0, len(result.chosen) - 1)
            self.proposer.settle(item, num_kept)
            self._num_drafted += result.num_guessed
            self._num_accepted += num_kept
        if seq.num_computed < seq.num_prompt:
            self._num_prompt_tokens += max(0, min(computed, seq.num_prompt) - seq.num_computed)
        if seq.prompt_logprobs is not None and result.prompt_logprobs:
            first = item.start + 1
            seq.prompt_logprobs[first : first + len(result.prompt_logprobs)] = result.prompt_logprobs
        if not result.chosen:
            self._publish(seq, computed)
            return None
        output = self._output(seq)
        if seq.num_output == 0:
            output.prompt_logprobs = seq.prompt_logprobs
        finish, reason = (None, None) if seq.request.params.max_tokens else ("length", None)
        for chosen in result.chosen:
            if finish:
                break
            finish, reason = self._take(seq, chosen, output)
        self._publish(seq, len(seq.tokens) - 1)
        output.num_output_tokens = seq.num_output
        if finish is None:
            return output
        if seq.stream is not None:
            output.text += seq.stream.finish()
        return self._end(seq, output, finish, reason)

    def _publish(self, seq: Seq, computed: int) -> None:
        self.scheduler.advance(seq, computed, seq.drafted if self.proposer and self.proposer.uses_pages else None)

    def _take(self, seq: Seq, chosen: Chosen, output: Output) -> tuple[str | None, str | int | None]:
        """Appends one chosen token; returns (finish, stop reason)."""
        if not chosen.finite:
            raise ArithmeticError("the model's logits are not finite")
        params, token = seq.request.params, chosen.token
        seq.tokens.append(token)
        output.tokens.append(token)
        self._num_output_tokens += 1
        if chosen.logprob is not None:
            output.logprobs.append(chosen.logprob)
        ended = token in self.eos_ids and not params.ignore_eos
        stopped = token in params.stop_token_ids
        if seq.stream is not None and (params.include_stop or not (ended or stopped)):
            output.text += seq.stream.push(token)
            if seq.stream.matched is not None:
                return "stop", seq.stream.matched
        if ended or stopped:
            return "stop", token if stopped else None
        return ("length", None) if len(seq.tokens) >= seq.max_tokens else (None, None)

    def _output(self, seq: Seq) -> Output:
        return Output(
            seq.request.id,
            num_prompt_tokens=seq.num_prompt,
            num_output_tokens=seq.num_output,
            num_cached_tokens=seq.num_cached,
        )

    def _end(
        self,
        seq: Seq,
        output: Output,
        finish: str,
        reason: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        output.finish, output.stop_reason, output.error = finish, reason, error
        del self._seqs[seq.request.id]
        self.scheduler.finish(seq)
        return output

    def stats(self) -> dict[str, float]:
        """Counters since the start and current gauges; names end in their unit."""
        scheduler, pool = self.scheduler, self.pool
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "pages_total": pool.num_pages,
            "pages_used": pool.num_used,
            "pages_free": pool.num_free,
            "pages_cached": pool.num_cached,
            "steps": self._num_steps,
            "prompt_tokens": self._num_prompt_tokens,
            "output_tokens": self._num_output_tokens,
            "prefix_query_tokens": scheduler.prefix_queries,
            "prefix_hit_tokens": scheduler.prefix_hits,
            "preemptions": scheduler.num_preemptions,
            "draft_tokens": self._num_drafted,
            "accepted_tokens": self._num_accepted,
            "kv_cache_bytes": self.cache_bytes,
        }

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        run: Run | None = None,
    ) -> list[Completion]:
        """Continues every prompt (text or token ids); completions in the order of the prompts.

        One `params` for all, or one each. With a `run`, its progress line shows tokens/s. Raises the errors of `add`.
        Requests queued by `add` before run together with these prompts; the next `step` returns their outputs.
        """
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise SpecError(f"{len(prompts)} prompts and {len(each)} params", fix="give one params, or one each")
        done: dict[str, Completion] = {}
        pending = []
        for place, (prompt, one) in enumerate(zip(prompts, each)):
            request = Request(f"generate-{next(self._arrivals)}-{place}", self._ids(prompt), one)
            done[request.id] = Completion(request.prompt, [], "", "abort")
            pending.append(request)
        others: list[Output] = []
        try:
            self._finish_all(pending, done, others, run or Run(quiet=True))
        finally:  # interrupted: unfinished requests must not run in the next call
            for request in pending:
                self.abort(request.id)
            self._outputs = joined(output for output in [*others, *self._outputs] if output.request_id not in done)
        return list(done.values())

    def _finish_all(self, requests: list[Request], done: dict[str, Completion], others: list[Output], run: Run) -> None:
        """Steps until every request of `done` is finished, queueing at most `max_waiting` at a time.

        Outputs of requests that are not in `done` are added to `others`.
        """
        coming = iter(requests)
        total = sum(request.params.max_tokens for request in requests)
        room = min(self.max_waiting, self.scheduler.max_num_seqs)
        unfinished = len(requests)
        with run.progress("generating", total, "tokens") as bar:
            while unfinished:
                while self.scheduler.num_waiting < room and (request := next(coming, None)) is not None:
                    self.add(request)
                for output in self.step():
                    if output.request_id not in done:
                        others.append(output)
                        continue
                    done[output.request_id].take(output)
                    unfinished -= output.finish is not None
                    bar.advance(len(output.tokens))

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise SpecError("a text prompt needs a tokenizer", fix="send token ids, or give the engine a tokenizer")
        return self.tokenizer.encode(prompt)
