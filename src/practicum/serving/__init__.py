"""Serving: a model behind a URL, for recipes whose teacher is on another machine or shared by runs.

`app` is the scoring server over the torch engine, `vllm` starts vLLM's own. May be imported by cli only.
"""
