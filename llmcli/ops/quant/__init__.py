"""Conversion of stored numbers to floating point for all GGUF and plain formats; some back."""

from llmcli.ops.quant.decode import DECODERS, FORMATS, PLAIN, check_format, dequantize
from llmcli.ops.quant.encode import quantize

__all__ = ["DECODERS", "FORMATS", "PLAIN", "check_format", "dequantize", "quantize"]
