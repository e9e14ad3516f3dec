"""Engines sample and score: tokens in, tokens out. `torch/` is built in, `vllm/` runs vLLM.

May be imported by sessions, learning, places and the layers above.
"""
