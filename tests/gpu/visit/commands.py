"""Runs the commands of stdin, a line each; 70 lines of each screen. Exit 1 where one failed.

What they import is imported once, and no device is in use before each is in a process of its own.
"""

import os
import shlex
import sys
import tempfile

import llmcli.commands.ladder.command
import llmcli.loading.load  # noqa: F401
from llmcli.cli.app import main

wrong = False
for line in sys.stdin.read().splitlines():
    print(f"\n$ llmcli {line}", flush=True)
    with tempfile.TemporaryFile("w+") as screen, open(os.devnull) as nothing:
        if not (child := os.fork()):
            for stream, file in enumerate((nothing, screen, screen)):
                os.dup2(file.fileno(), stream)
            os._exit(main(shlex.split(line)))
        failed = os.waitpid(child, 0)[1] != 0
        screen.seek(0)
        print(*screen.read().splitlines()[:70], *["^ failed"] * failed, sep="\n", flush=True)
    wrong |= failed
sys.exit(wrong)
