"""A disk that is full, for this process."""

import resource
from contextlib import contextmanager


@contextmanager
def largest_file(size):
    """The system refuses to write more than `size` bytes into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
