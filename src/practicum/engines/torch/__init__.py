"""The built-in engine: continuous batching on a transformers model, with prompts computed once per group."""
