"""How the kernels are compiled when llmcli is installed: several sources at a time.

pyproject.toml names it. It imports nothing of the package, which is not installed by then.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class Build(build_ext):  # type: ignore[misc, unused-ignore]  # untyped before setuptools 71
    """setuptools' command, with its compiler in several threads: they wait for programs."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link an extension; the sources begin in the order of their list."""
        one = self.compiler.compile

        def each(sources: Sequence[str], **options: Any) -> list[str]:
            # the longest source takes two fifths of all: more than four would only take memory
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                made = pool.map(lambda source: one([source], **options), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = each
        super().build_extension(ext)
