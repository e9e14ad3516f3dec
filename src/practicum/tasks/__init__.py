"""Prompts: dataset files, built-in tasks, the prompt stream.

Imports no torch: a tokenizer comes in as an argument.
"""
