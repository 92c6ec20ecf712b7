"""Quantization-aware training: the layers' linears compute with weights rounded to the grid on which they will be exported."""

from hone.base.table import Table

FAKE_QUANTIZERS = Table(
    "fake quantizer",
    {
        "integer": "hone.train.quantization_aware.integer:Integer",
        "lsq": "hone.train.quantization_aware.lsq:LearnedSteps",
        "fp8": "hone.train.quantization_aware.floats:FP8",
        "nvfp4": "hone.train.quantization_aware.floats:NVFP4",
        "mxfp4": "hone.train.quantization_aware.floats:MXFP4",
        "mxfp8": "hone.train.quantization_aware.floats:MXFP8",
    },
)
