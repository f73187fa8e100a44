"""What varies within each family, in words, for the list of what is supported."""

WORDS = {
    "gpt2": "LayerNorm, learned positions, GELU MLP, biases, tied head",
    "llama": "RMSNorm, rotary positions (linear, dynamic, llama3, yarn, longrope), grouped "
    "queries, gated SiLU MLP; biases, window and tied head as configured",
    "qwen": "the same with biases of q, k, v (qwen2) or normalized queries and keys (qwen3), "
    "windows by layer",
}
