"""Text out of a model: sampling, stop strings, and the loop that prefills and decodes."""

from llmcli.generation.engine import TextRequest, stream
from llmcli.generation.output import Finish, Token
from llmcli.generation.sampling import Sampling, choose, filtered, sample
from llmcli.generation.seeds import sample_seed, uniforms
from llmcli.generation.stop import StopMatcher

__all__ = [
    "Finish",
    "Sampling",
    "StopMatcher",
    "TextRequest",
    "Token",
    "choose",
    "filtered",
    "sample",
    "sample_seed",
    "stream",
    "uniforms",
]
