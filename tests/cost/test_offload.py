"""Which layers stream from host memory, and amounts of memory as texts."""

from __future__ import annotations

import pytest

from hone.base.figure import byte_count
from hone.cost.serve.offload import NUM_BUFFERS, Offload, evenly_spaced, fewest_streamed


class TestWhatStreams:
    def test_layers_are_spread_evenly(self):
        for total in range(3, 40):
            for count in range(1, total + 1):
                found = evenly_spaced(total, count)
                assert len(set(found)) == count and found[0] >= 0 and found[-1] < total
                gaps = {b - a for a, b in zip(found, (*found[1:], found[0] + total))}
                assert max(gaps) - min(gaps) <= 1

    def test_no_more_stream_than_must(self):
        sizes, streams = [10.0] * 8, []
        for room in range(15, 90):
            found = fewest_streamed(sizes, room)
            if room < 20:
                assert found is None, "two buffers are needed in any case"
                continue
            assert found is not None and found.device_bytes <= room
            streams.append(len(found.streamed))
            assert len(found.streamed) not in (1, NUM_BUFFERS), "as many layers as buffers would save nothing"
            fewer = Offload(tuple(sizes), evenly_spaced(8, len(found.streamed) - 1))
            assert not found.streamed or fewer.device_bytes > room
        assert streams == sorted(streams, reverse=True) and streams[0] == 8 and streams[-1] == 0

    def test_a_large_layer_needs_large_buffers(self):
        found = fewest_streamed([100.0, 10, 10, 10, 10, 10], 140)
        assert found is not None and 0 not in found.streamed and found.buffer_bytes == 20
        assert fewest_streamed([1.0, 1.0], 1.5) is None

    def test_amounts_of_memory(self):
        assert [byte_count(one) for one in ("20GiB", "1.5 GB", "77", "3e9", "5B")] == [
            20 << 30,
            1_500_000_000,
            77,
            3 * 10**9,
            5,
        ]
        assert byte_count("80%", 1000) == 800
        for wrong in ("", "GiB", "-3GiB", "20 gigs", "0", "nan"):
            with pytest.raises(ValueError, match="no amount of memory"):
                byte_count(wrong)
