"""vLLM as an engine: in its own process, tokens in and tokens out."""
