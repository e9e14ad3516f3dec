"""Engines sample and score: tokens in, tokens out. `torch/` is built in, `vllm/` runs vLLM."""
