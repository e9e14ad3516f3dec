"""Serving: a model behind a URL, for recipes whose teacher is on another machine or shared by runs.

`torch_server` scores with the torch engine, `vllm_server` starts vLLM's own.
May be imported by runtime and the layers above.
"""
