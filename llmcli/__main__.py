"""`python -m llmcli` is `llmcli`."""

import sys

from llmcli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
