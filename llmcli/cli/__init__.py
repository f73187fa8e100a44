"""The command line: which commands there are, their help, and completion in shells."""
