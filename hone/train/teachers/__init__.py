"""Teachers: whose predictions a distillation learns from."""

from hone.base.table import Table

TEACHERS = Table(
    "teacher",
    {
        "fixed": "hone.train.teachers.fixed:Fixed",
        "cached": "hone.train.teachers.cached:Cached",
        "moving_average": "hone.train.teachers.moving_average:MovingAverage",
        "temporal_ensemble": "hone.train.teachers.temporal_ensemble:TemporalEnsemble",
        "theseus": "hone.train.teachers.theseus:Theseus",
        "peer": "hone.train.teachers.peer:Peer",
    },
)
