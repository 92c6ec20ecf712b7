"""What is outside a model's layers: written first, and put into a model as it is written."""

from __future__ import annotations

from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.compress.engine import modules
from hone.compress.engine.job import Job
from hone.compress.engine.solving import quantized_embedding
from hone.compress.shards import mark, read_shard, shard_file, write_shard
from hone.compress.sizes import stored_rest
from hone.compress.targets import EMBEDDING, has_head
from hone.model.decoder import Decoder


def write(job: Job, draft: Draft) -> None:
    """Writes the shard of the tensors outside the layers, if it is not there."""
    path = shard_file(draft, -1, job.num_shards)
    if path.exists():
        return
    tensors: dict[str, Tensor] = {}
    if job.embedding is not None:
        tensors, row = quantized_embedding(job, job.embedding)
        mark(draft, -1, [row], tensors)
    for name in job.ends():
        tensor = job.checkpoint.tensor(name)
        dtype = stored_rest(tensor.dtype, tensor.shape, job.rest_dtype)
        tensors[name] = job.checkpoint.converted(name, tensor, "cpu", dtype)
    write_shard(path, tensors)


def sizes(job: Job) -> dict[str, int]:
    """Bytes of the tensors that `write` writes as floats, by name."""
    found = {}
    for name in job.ends():
        tensor = job.checkpoint.tensor(name)
        found[name] = tensor.numel() * stored_rest(tensor.dtype, tensor.shape, job.rest_dtype).itemsize
    return found


def put(job: Job, draft: Draft, model: Decoder) -> None:
    """Makes what `write` wrote of `model` what it is on disk: the embedding, and a head that is not compressed."""
    for linear in (model.embed_tokens, model.lm_head) if job.rest_dtype is not None else ():
        if linear is not None:
            stored = linear.weight.detach().to(job.rest_dtype).to(job.dtype)
            linear.weight = nn.Parameter(stored, requires_grad=False)
    if job.embedding is not None:
        written = read_shard(shard_file(draft, -1, job.num_shards), f"{EMBEDDING}.")
        step = job.storage.of(-1, job.embedding)
        assert step is not None
        step.module(model.embed_tokens, modules.parts_of(job, -1, job.embedding, written))


def put_all(job: Job, draft: Draft, model: Decoder) -> None:
    """Makes embedding and head of `model` what they are on disk, when the last layer is there."""
    put(job, draft, model)
    if has_head(job.targets):
        index = job.checkpoint.config.num_layers
        (head,) = job.targets[index]
        modules.put(job, model, index, head, read_shard(shard_file(draft, index, job.num_shards)))
