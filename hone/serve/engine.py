"""The engine: requests in, tokens and text out, one step at a time. In Python: `hone.Engine(folder).generate(...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from hone.base.errors import FitError, SpecError
from hone.base.run import Run
from hone.model import hf
from hone.model.decoder import Decoder
from hone.model.tokenizer import Tokenizer, identity_of, load_tokenizer
from hone.serve import DRAFTERS
from hone.serve.detokenize import TextStream
from hone.serve.pages import KVCache, PagePool, page_bytes
from hone.serve.request import BusyError, Completion, Output, Request, SamplingParams
from hone.serve.runner import Runner, Step
from hone.serve.sampler import Chooser, Chosen, Entry, Sampler
from hone.serve.scheduler import Row, Scheduler
from hone.serve.sizing import cache_pages, check_weights, kv_shapes, step_threads
from hone.serve.spec import EngineSpec
from hone.serve.speculate import Drafter

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
        draft_model: Decoder | Path | str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec or EngineSpec()
        self.device = torch.device(device)
        if not isinstance(model, Decoder):
            if tokenizer is None and (Path(model) / "tokenizer.json").exists():
                tokenizer = load_tokenizer(model)
            check_weights(model, self.device)
            model = hf.load(model, device=device, dtype=dtype)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        config = model.config
        self.eos_ids = frozenset((*config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())))
        longest = self.spec.max_model_len or config.max_seq_len
        drafter, draft = _open_draft(self.spec, draft_model, tokenizer, device, dtype)
        dtype, size = model.embedding.dtype, self.spec.page_size
        one = page_bytes(kv_shapes(config), size, dtype)
        if draft is not None:
            one += page_bytes(kv_shapes(draft.config), size, draft.embedding.dtype)
        num_pages = cache_pages(self.spec, one, self.device, longest)
        self.max_model_len = min(longest, num_pages * size)
        self.pool = PagePool(num_pages, size, prefix_cache=self.spec.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=self.spec.max_rows,
            token_budget=self.spec.token_budget,
            batching=self.spec.batching,
            lookahead=drafter.num_tokens if drafter else 0,
            lookahead_rows=drafter.max_rows if drafter else 0,
        )
        cache = KVCache(kv_shapes(config), num_pages, size, dtype=dtype, device=self.device)
        sampler = Sampler(config.vocab_size, self.device)
        budget = self.spec.token_budget
        proposer = drafter.open(model, draft, sampler, num_pages, size, budget, self.device) if drafter else None
        self.runner = Runner(model, cache, sampler, self.device, proposer)
        self._num_params = config.num_params
        self._rows: dict[str, Row] = {}
        self._arrivals = count()
        self._outputs: list[Output] = []  # of aborts, and of others' steps in `generate`: delivered by the next step
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the page pool, the draft model's part included."""
        proposer = self.runner.proposer
        return self.runner.cache.num_bytes + (proposer.cache_bytes if proposer else 0)

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or an output undelivered."""
        return bool(self._rows or self._outputs)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises SpecError for impossible parameters or tokens, FitError for a prompt longer than `max_model_len` allows,
        BusyError when `max_waiting` requests wait already.
        """
        params, vocab_size = request.params, self.model.config.vocab_size
        if request.id in self._rows:
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
        if self.scheduler.num_waiting >= self.spec.max_waiting:
            raise BusyError(f"{self.scheduler.num_waiting} requests wait already", fix="try again in a moment")
        self._rows[request.id] = row = self._row(request)
        self.scheduler.add(row)

    def _row(self, request: Request) -> Row:
        params = request.params
        row = Row(request, next(self._arrivals), min(len(request.prompt) + params.max_tokens, self.max_model_len))
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids))
        row.entry = Entry(Chooser(params, ends), row.tokens, row.num_prompt)
        row.speculates = self.runner.proposer is not None and not row.entry.chooser.penalized
        if params.prompt_logprobs is not None:
            row.prompt_logprobs = [None] * row.num_prompt
        if self.tokenizer is not None:
            row.stream = TextStream(
                self.tokenizer,
                request.prompt,
                params.stop,
                include_stop=params.include_stop,
                min_tokens=params.min_tokens,
            )
        return row

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; its last output (finish "abort") comes with the next step. Unknown ids: nothing."""
        row = self._rows.get(request_id)
        if row is not None:
            self._outputs.append(self._end(row, self._output(row), "abort"))

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Does the next piece of work; returns what is new, at most one output a request.

        What `generate` computed for other requests meanwhile is new too: nothing is lost, and nothing comes twice.
        """
        held = bool(self._outputs)
        work, fresh = self.scheduler.schedule()
        if not work:
            assert not self._rows, f"{len(self._rows)} requests wait and nothing can run"
            return self._deliver(held)
        self.runner.wipe(fresh)
        self._num_steps += 1
        with self._threads(sum(item.count for item in work)):
            steps = self.runner.run(work)
        for step in steps:
            output = self._settle(step)
            if output is not None:
                self._outputs.append(output)
        return self._deliver(held)

    def _deliver(self, held: bool) -> list[Output]:
        """Everything undelivered. `held`: some of it is older than this step, so a request may have several pieces."""
        outputs, self._outputs = self._outputs, []
        return _joined(outputs) if held else outputs

    @contextmanager
    def _threads(self, num_tokens: int) -> Iterator[None]:
        """Sets the CPU threads of a step of `num_tokens`; the process gets its own number back.

        Threads meet after every operation. In small steps the meeting costs more than the sharing saves, and when
        anything else wants the core, it costs a time slice each.
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

    def _settle(self, step: Step) -> Output | None:
        """Books a row's step; whatever goes wrong here ends this row alone."""
        row = step.row
        if step.error is None:
            try:
                return self._advance(row, step)
            except Exception as error:
                step.error = f"{type(error).__name__}: {error}"
        self.pool.forget(row.pages)
        return self._end(row, self._output(row), "error", error=step.error)

    def _advance(self, row: Row, step: Step) -> Output | None:
        self._num_prompt_tokens += max(0, min(step.computed, row.num_prompt) - row.num_computed)
        if not step.chosen:
            self._publish(row, step.computed)
            return None
        output = self._output(row)
        if row.num_output == 0:
            output.prompt_logprobs = row.prompt_logprobs
        finish, reason = (None, None) if row.request.params.max_tokens else ("length", None)
        for chosen in step.chosen:
            if finish:
                break
            finish, reason = self._take(row, chosen, output)
        self._publish(row, len(row.tokens) - 1)
        output.num_output_tokens = row.num_output
        if finish is None:
            return output
        if row.stream is not None:
            output.text += row.stream.finish()
        return self._end(row, output, finish, reason)

    def _publish(self, row: Row, computed: int) -> None:
        proposer = self.runner.proposer
        self.scheduler.advance(row, computed, row.drafted if proposer is not None and proposer.uses_pages else None)

    def _take(self, row: Row, chosen: Chosen, output: Output) -> tuple[str | None, str | int | None]:
        """Appends one chosen token; returns (finish, stop reason)."""
        if not chosen.finite:
            raise ArithmeticError("the model's logits are not finite")
        params, token = row.request.params, chosen.token
        row.tokens.append(token)
        output.tokens.append(token)
        self._num_output_tokens += 1
        if chosen.logprob is not None:
            output.logprobs.append(chosen.logprob)
        ended = token in self.eos_ids and not params.ignore_eos
        stopped = token in params.stop_token_ids
        if row.stream is not None and (params.include_stop or not (ended or stopped)):
            output.text += row.stream.push(token)
            if row.stream.matched is not None:
                return "stop", row.stream.matched
        if ended or stopped:
            return "stop", token if stopped else None
        return ("length", None) if len(row.tokens) >= row.max_tokens else (None, None)

    def _output(self, row: Row) -> Output:
        return Output(
            row.request.id,
            num_prompt_tokens=row.num_prompt,
            num_output_tokens=row.num_output,
            num_cached_tokens=row.num_cached,
        )

    def _end(
        self,
        row: Row,
        output: Output,
        finish: str,
        reason: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        output.finish, output.stop_reason, output.error = finish, reason, error
        del self._rows[row.request.id]
        self.scheduler.finish(row)
        return output

    def stats(self) -> dict[str, float]:
        """Counters since the start and gauges of now; names end in their unit."""
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
            "draft_tokens": self.runner.num_drafted,
            "accepted_tokens": self.runner.num_accepted,
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

        One `params` for all, or one each. With a `run`, its progress line shows tokens/s. Raises what `add` raises.
        Requests queued by `add` before go on beside these prompts; their outputs come with the next `step`.
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
        finally:  # interrupted: what is unfinished must not haunt the next call
            for request in pending:
                self.abort(request.id)
            self._outputs = _joined(output for output in [*others, *self._outputs] if output.request_id not in done)
        return list(done.values())

    def _finish_all(self, requests: list[Request], done: dict[str, Completion], others: list[Output], run: Run) -> None:
        """Steps until every request of `done` is finished, never with more waiting than may wait.

        Outputs of requests that are not in `done` are added to `others`.
        """
        coming = iter(requests)
        total = sum(request.params.max_tokens for request in requests)
        room = min(self.spec.max_waiting, self.spec.max_rows)
        unfinished = len(requests)
        with run.progress("generating", total, "tokens") as bar:
            while unfinished:
                while self.scheduler.num_waiting < room and (request := next(coming, None)) is not None:
                    self.add(request)
                for output in self.step():
                    if output.request_id not in done:
                        others.append(output)
                        continue
                    _collect(done[output.request_id], output)
                    unfinished -= output.finish is not None
                    bar.advance(len(output.tokens))

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise SpecError("a text prompt needs a tokenizer", fix="send token ids, or give the engine a tokenizer")
        return self.tokenizer.encode(prompt)


def _open_draft(
    spec: EngineSpec,
    model: Decoder | Path | str | None,
    tokenizer: Tokenizer | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> tuple[Drafter | None, Decoder | None]:
    """The drafter and its model. A draft model without a drafter named is used by the drafter "draft_model"."""
    drafter = spec.drafter
    if drafter is None and model is not None:
        drafter = DRAFTERS.read("draft_model")
    if drafter is None:
        return None, None
    wanted = "draft" in drafter.needs
    if wanted != (model is not None):
        raise SpecError(
            f"the drafter '{drafter.kind}' {'needs a' if wanted else 'has no use for a'} draft model",
            fix="give draft_model=FOLDER" if wanted else "leave draft_model out",
        )
    if model is not None and not isinstance(model, Decoder):
        theirs = identity_of(model)
        if tokenizer is not None and theirs not in (None, tokenizer.identity):
            raise SpecError(
                f"the draft model {model} has another tokenizer than the model",
                fix="use a draft model with the same tokenizer",
            )
        check_weights(model, torch.device(device))
        model = hf.load(model, device=device, dtype=dtype)
    return drafter, model.eval().requires_grad_(False) if model is not None else None


def _joined(outputs: Iterable[Output]) -> list[Output]:
    """One output a request: what came in several pieces is put together, up to its end."""
    joined: list[Output] = []
    growing: dict[str, Output] = {}
    for output in outputs:
        first = growing.get(output.request_id)
        if first is None:
            joined.append(output)
        else:
            first.extend(output)
        if output.finish is None:
            growing[output.request_id] = first or output
        else:  # a later request may have the same id
            growing.pop(output.request_id, None)
    return joined


def _collect(completion: Completion, output: Output) -> None:
    completion.tokens += output.tokens
    completion.text += output.text
    completion.logprobs += output.logprobs
    completion.num_cached_tokens = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        completion.prompt_logprobs = output.prompt_logprobs
    if output.finish is not None:
        completion.finish, completion.stop_reason, completion.error = output.finish, output.stop_reason, output.error
