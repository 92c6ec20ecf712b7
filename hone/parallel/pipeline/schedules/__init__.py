"""The pipeline schedules, each a function of ranks and microbatches that returns its table."""

from hone.parallel.pipeline.schedules.breadth_first import breadth_first
from hone.parallel.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from hone.parallel.pipeline.schedules.gpipe import gpipe
from hone.parallel.pipeline.schedules.interleaved import interleaved
from hone.parallel.pipeline.schedules.naive import naive
from hone.parallel.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from hone.parallel.pipeline.schedules.pipedream import pipedream, pipedream_2bw, pipedream_vertical
from hone.parallel.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from hone.parallel.pipeline.schedules.zero_bubble_v import zb_v

SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "pipedream": pipedream,
    "pipedream_vertical": pipedream_vertical,
    "pipedream_2bw": pipedream_2bw,
}
