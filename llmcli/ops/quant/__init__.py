"""Stored numbers to floating point: every format of GGUF, and the plain ones of safetensors."""

from llmcli.ops.quant.decode import DECODERS, FORMATS, PLAIN, check_format, dequantize

__all__ = ["DECODERS", "FORMATS", "PLAIN", "check_format", "dequantize"]
