"""Text and token ids: tokenizers of checkpoints, chat templates, streaming decode. No torch."""

from llmcli.text.chat import ChatTemplate
from llmcli.text.load import load_tokenizer
from llmcli.text.stream import StreamDecoder
from llmcli.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "load_tokenizer"]
