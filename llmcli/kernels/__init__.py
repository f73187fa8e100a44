"""C kernels, fast versions of operations; `llmcli.ops` decides when they are used."""
