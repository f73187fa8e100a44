"""`python -m llmcli` is `llmcli`."""

from llmcli.cli.app import script

if __name__ == "__main__":
    script()
