"""Numbers that guides to the field print, from hone's closed forms; and those that do not add up."""

from __future__ import annotations

import pytest
import torch

from hone.cost.calculators.bits import Bits
from hone.cost.calculators.bubble import Bubble
from hone.cost.calculators.flops import Flops
from hone.cost.calculators.kv import KV
from hone.cost.calculators.model import Sized
from hone.cost.calculators.train import TrainMemory
from hone.cost.calculators.waste import Waste
from hone.cost.calculators.zero import Zero
from hone.cost.catalogue.compare import Decode, decode_bound
from hone.cost.catalogue.read import catalogue
from hone.cost.ranks import messages_and_bytes
from hone.model.shape import Shape


def test_states_of_175_billion_weights():
    """In float32 700 GB of weights, 700 of gradients and 1,400 of Adam's moments: 2.8 TB, and more than 3 with activations."""
    sheet = Zero(params=175e9, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, ranks=1).sheet()
    assert [175e9 * one / 1e9 for one in (4, 4, 8)] == [700, 700, 1400]
    assert sheet["DDP: every rank has all"] == 2.8e12
    half = TrainMemory(model="gpt3-175b", micro_batch=1).sheet()
    assert half["bytes of states"] == pytest.approx(16 * 174.57e9, rel=1e-3), (
        "as many bytes with float32 weights beside half ones"
    )
    assert half["bytes of states"] + half["activations of the first stage"] > 2.8e12
    batch = 32 * TrainMemory(model="gpt3-175b", dropout=False, flash=True).sheet()["activations of the first stage"]
    assert half["bytes of states"] + batch > 3e12, "a batch of 32 sequences makes it more than 3 TB"


def test_cache_of_80_layers():
    """80 layers of 4,096: 655,360 numbers a token, 1.3 MB of a token and 2.7 GB (2.5 GiB, which guides round to 2.6 GB) at 2,048 tokens."""
    sheet = KV(layers=80, hidden_size=4096, heads=32, tokens=2048).sheet()
    assert sheet["MHA: numbers a token"] == 2 * 80 * 4096 == 655_360
    assert sheet["bytes of a sequence"] == 2_684_354_560 and 2_684_354_560 / 2**30 == 2.5
    assert pytest.approx(1.34e9, rel=0.002) == 655_360 * 2048, "1.3 billion numbers"


@pytest.mark.parametrize(("heads", "groups"), [(32, 8), (64, 8), (12, 1)])
def test_cache_by_kind_of_attention(heads, groups):
    """H x 2 d numbers a layer and token of MHA, 2 d of MQA, H / G times fewer of GQA with G key heads."""
    many = KV(layers=1, heads=heads, head_dim=64, kv_heads=groups).sheet()
    assert many["MHA: numbers a token"] == heads * 2 * 64 and many["MQA: numbers a token"] == 2 * 64
    assert many["times smaller than MHA"] == heads / groups


@pytest.mark.parametrize(("d", "m"), [(4, 4), (4, 8), (8, 64)])
def test_pipeline_bubble(d, m):
    sheet = Bubble(stages=d, microbatches=m, layers=100).sheet()
    assert sheet["GPipe, 1F1B: of the step"] == pytest.approx((d - 1) / (m + d - 1))
    assert sheet["sqrt(L) checkpoints: layers alive"] == 10, "of 100 layers"


@pytest.mark.parametrize("n", [2, 4, 64])
def test_ring_all_reduce(n):
    """2 (N - 1) messages of X / N: 2 (N - 1) / N X. Of 4 GPUs 6 messages of a quarter, 1.5 X."""
    messages, num_bytes = messages_and_bytes("all_reduce", "ring", n, 1e9)
    assert (messages, num_bytes) == (2 * (n - 1), 2 * (n - 1) / n * 1e9)
    assert n != 4 or (messages, num_bytes) == (6, 1.5e9)


def test_zero_stages():
    """4, 8 and N times less with many ranks, and half as much traffic again in stage 3."""
    sheet = Zero(params=1e9, ranks=1024).sheet()
    assert [round(sheet[f"ZeRO-{stage}: times smaller"]) for stage in (1, 2, 3)] == [4, 8, 1024]
    assert sheet["ZeRO-3 sends times more"] == 1.5


def test_layouts_of_a_grid():
    """8 x 16 x 8 = 1,024 devices; 32 heads over 8 tensor-parallel ranks are 4 heads a rank, by the model's own division."""
    assert "8 x 8 x 16 = 1,024" in TrainMemory(model="megatron-1t", data=8, tensor=8, pipeline=16).sheet().title
    shape = Shape(num_layers=2, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128, intermediate_size=256)
    config = shape.config(256).local(8)
    assert config.layers[0].mixer.num_heads == 4


def test_bits_of_formats():
    """INT8 4 times, INT4 8 times and FP16 2 times smaller than FP32; 5 and 10 bits of FP16, 8 and 7 of BF16."""
    assert [Bits(bits=bits).sheet()["times smaller than 32 bits"] for bits in (8, 4, 16)] == [4, 8, 2]
    for dtype, exponent, mantissa in ((torch.float16, 5, 10), (torch.bfloat16, 8, 7), (torch.float32, 8, 23)):
        info = torch.finfo(dtype)
        assert info.eps == 2.0**-mantissa and info.bits == 1 + exponent + mantissa
        assert info.max == (2 - 2.0**-mantissa) * 2.0 ** (2 ** (exponent - 1) - 1)


def test_attention_is_quadratic():
    """4 M scores of a head at 2,048 tokens; twice the tokens four times the scores."""
    scores = [
        Flops(model="llama-3-8b", seq_len=s).sheet()["scores of one head"] for s in (1024, 2048, 4096, 16384, 65536)
    ]
    assert scores == [2**20, 2**22, 2**24, 2**28, 2**32]
    ratio = [Flops(model="llama-3-8b", seq_len=s).sheet()["attention of a token, causal"] for s in (2047, 4095)]
    assert ratio[1] / ratio[0] == 2, "a token's attention grows with the tokens before it"


def test_recomputation_takes_a_third_more():
    sheet = Flops(model="llama-3-8b").sheet()
    assert sheet["a token, all layers recomputed"] / sheet["a token in training"] - 1 == pytest.approx(0.333, abs=1e-3)


def test_waste_of_pages():
    """60 % of a reserved cache unused where sequences have 800 of 2,048 tokens, less than 4 % with pages of 16."""
    sheet = Waste(mean_tokens=800, max_tokens=2048, page_size=16).sheet()
    assert sheet["reserved to the longest: waste"] == pytest.approx(0.61, abs=0.01) and sheet["by pages: waste"] < 0.04


# What does not add up.


def test_the_price_of_a_training_in_a_guide_is_ten_markets():
    """256 GPUs x $30 x 720 h is $5.53 M as printed; at the catalogue's on-demand price it is a tenth of that."""
    assert 256 * 30 * 720 == 5_529_600
    prices = catalogue().prices_of(catalogue().accelerator("H100"), "on_demand")
    assert min(30 / one.usd_per_h for one in prices) > 6.5 and max(30 / one.usd_per_h for one in prices) > 13
    savings = {"training": (6.1e6, 3.2e6), "serving": (725e3, 90e3)}
    found = {name: 1 - after / before for name, (before, after) in savings.items()}
    assert found == pytest.approx({"training": 0.48, "serving": 0.88}, abs=0.006), (
        "its percentages follow from its sums"
    )


def test_70_billion_weights_and_5_trillion_tokens_are_no_two_weeks():
    """2.1e24 FLOP: 240 days on 256 H100 at 40 %; two weeks buy 292 billion tokens, a month at $30 does not buy the training."""
    flops = 6 * 70e9 * 5e12
    assert flops == pytest.approx(2.1e24)
    row = catalogue().accelerator("H100")
    rate = 256 * 0.4 * row.flops_per_s["bfloat16"]
    assert flops / rate / 86400 == pytest.approx(240, abs=1)
    assert 14 * 86400 * rate / (6 * 70e9) == pytest.approx(292e9, rel=0.002)
    sheet = Flops(model="llama-3-70b", seq_len=4096, tokens=5e12, gpus=256, accelerator="H100", utilization=0.4).sheet()
    assert sheet["days"] > 240 and sheet["device hours"] > 8 * 256 * 720, "attention's operations come on top"


def test_100_tokens_in_50_ms_need_more_bandwidth_than_a_device_has():
    """35 GB of weights read once a token: 70 TB/s, where the fastest device sold with so much memory has 8."""
    needed = 100 / 0.05 * 35e9
    assert needed == pytest.approx(70e12)
    sold = [
        one
        for one in catalogue().accelerators
        if not one.announced and (one.memory_bytes or 0) > 35e9 and one.memory != "SRAM"
    ]
    assert max(one.bytes_per_s or 0 for one in sold) == 8e12 < needed / 8
    most = max(decode_bound(one, "bfloat16", Decode(70e9, bits=4))[0] or 0 for one in sold)
    assert 100 / most > 0.4, "100 tokens take 0.44 s at least"


def test_the_guides_large_model_has_69_billion_weights():
    """What a case study calls 'about 70 billion': 80 layers of 8,192 with a vocabulary of 32,000 are 68.98."""
    assert Sized(model="llama-2-70b").sized().dims().num_params == pytest.approx(68.98e9, rel=1e-3)
