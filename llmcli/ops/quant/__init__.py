"""Stored numbers to floating point, every format of GGUF and the plain ones; some of it back."""

from llmcli.ops.quant.decode import DECODERS, FORMATS, PLAIN, check_format, dequantize
from llmcli.ops.quant.encode import quantize

__all__ = ["DECODERS", "FORMATS", "PLAIN", "check_format", "dequantize", "quantize"]
