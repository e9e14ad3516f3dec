"""vLLM as an engine: in a process of its own, tokens in and tokens out."""
