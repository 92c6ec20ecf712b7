"""Full garbage collections during a loop do not visit what existed before."""

from __future__ import annotations

import gc
import weakref

from hone.serve.device.heap import frozen_heap


class Node:
    pass


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.own = node
    return weakref.ref(node)


def test_only_later_objects_are_collected() -> None:
    gc.collect()
    before = cycle()
    with frozen_heap():
        assert gc.get_freeze_count() > 1000
        later = cycle()
        gc.collect()
        assert before() is not None and later() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
