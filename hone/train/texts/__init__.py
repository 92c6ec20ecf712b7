"""Texts: what a distillation compares student and teacher on."""

from hone.base.table import Table

TEXTS = Table(
    "text",
    {
        "data": "hone.train.texts.given:Given",
        "student": "hone.train.texts.sampled:StudentText",
        "teacher": "hone.train.texts.sampled:TeacherText",
    },
)
