"""Which layouts of ranks train a model with experts; others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


def notes(config: ModelConfig) -> tuple[str, ...]:
    """What a plan says of experts; nothing without any."""
    if config.active_params == config.num_params:
        return ()
    share = config.active_params / config.num_params
    return (
        f"experts: a token uses {config.active_params:,} of {config.num_params:,} parameters ({share:.0%}); times count those, memory all",
    )


def expert_params(config: ModelConfig) -> int:
    """Weights of all experts of all layers, without those that every token visits."""
    linears = (one for index in range(config.num_layers) for one in config.linears(index).values())
    return sum(one.num_params for one in linears if one.experts is not None)


def check_experts(config: ModelConfig, parallelism: Any) -> None:
    """Raises SpecError where the ranks of `parallelism`, a `Parallelism`, cannot train the experts of `config`."""
    layers = {
        index: layer.feed_forward for index, layer in enumerate(config.layers) if layer.feed_forward.kind == "moe"
    }
    if not layers:
        return
    first = next(iter(layers))
    schedule, stages = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    if stages > 1 and not schedule.exact:
        raise SpecError(
            f"layer {first} has experts, and with pipeline_parallel_schedule {schedule.kind} stages update at different times: their "
            "loads are of no one step",
            fix="take another pipeline_parallel_schedule, such as 1f1b, or set parallelism.pipeline_parallel_degree to 1",
        )
    held = [stage for own in (schedule.held(stages) if stages > 1 else ()) for stage in own]
    if parallelism.expert_parallel_degree > 1 and len(set(held)) < len(held):
        raise SpecError(
            f"pipeline_parallel_schedule {schedule.kind} has each stage on two ranks, between which divided experts are not shared yet",
            fix="take another pipeline_parallel_schedule, such as zb_v, or set parallelism.expert_parallel_degree to 1",
        )
    whole = next((index for index, one in layers.items() if one.whole_sequences), None)
    if parallelism.context_parallel_degree > 1 and whole is not None:
        raise SpecError(
            f"layer {whole} has a capacity_factor or a sequence_loss, which are of whole sequences, and ranks share each sequence",
            fix="set parallelism.context_parallel_degree to 1, or leave capacity_factor and sequence_loss out",
        )
    biased = next((index for index, one in layers.items() if one.bias), None)
    if not parallelism.data_parallel.exact and biased is not None:
        raise SpecError(
            f"layer {biased} has the balance 'bias', which moves by the loads of all ranks, and ranks of data_parallel "
            f"{parallelism.data_parallel.kind} do not meet in every step",
            fix="take data_parallel ddp or zero1 to zero3, or balance: [aux_loss]",
        )
