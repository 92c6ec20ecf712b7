"""Which linears patterns choose: in hone's own syntax and in that of compressed-tensors and vLLM."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.compress.targets import select
from hone.model.shape import Shape

CONFIG = Shape(hidden_size=32, num_layers=12, num_heads=4, num_kv_heads=2, intermediate_size=64, max_seq_len=64).config(
    256
)
EVERY = ["mixer.qkv", "mixer.out", "feed_forward.gate_up", "feed_forward.down"]


@pytest.mark.parametrize(
    ("targets", "ignore", "left"),
    [
        (["re:.*"], ["re:.*down_proj"], {}),
        (["re:model.layers.1.*"], ["re:.*down_proj$", "lm_head"], {0, *range(2, 10)}),  # 1, 10 and 11
        ([r"\.layers\."], [r"down_proj", "lm_head", "model.embed_tokens"], {}),
    ],
)
def test_both_syntaxes(targets, ignore, left):
    *layers, head = (*select(CONFIG, targets, ignore), ()) if "lm_head" in ignore else select(CONFIG, targets, ignore)
    assert [linear.path for linear in head] == ([] if "lm_head" in ignore else ["lm_head"])
    for index, chosen in enumerate(layers):
        assert [linear.path for linear in chosen] == ([] if index in left else EVERY[:-1])


@pytest.mark.parametrize(
    ("targets", "ignore", "says", "helps"),
    [
        ([r"\.layers\."], ["re:down_proj"], "ignore: 're:down_proj'", "model.layers.0.mlp.down_proj"),  # from the start
        (["Linear"], ["lm_head"], "targets: 'Linear'", "model.layers.0."),
        ([r"\.layers\."], ["lm_head", "re:.*o_prj"], "ignore: 're:.*o_prj'", "model.layers.0.self_attn.o_proj"),
        ([r"\.layers\."], [r"\.layers\."], "name no linear", "model.layers.0."),
    ],
)
def test_a_pattern_that_matches_nothing_is_said_with_names_like_it(targets, ignore, says, helps):
    with pytest.raises(SpecError) as caught:
        select(CONFIG, targets, ignore)
    assert says in caught.value.what and helps in caught.value.fix
