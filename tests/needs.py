"""What a test cannot do without: where it is missing the test is skipped, with a line."""

import pytest

from llmcli.kernels import native

needs_kernels = pytest.mark.skipif(native.level() is None, reason="there are no kernels")
