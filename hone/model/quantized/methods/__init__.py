"""The `quantization_config` blocks of config.json, one file a `quant_method`: `read(values, where)` and `to_json(quantization)`."""
