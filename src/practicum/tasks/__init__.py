"""Prompts: dataset files, built-in tasks, the prompt stream.

Imports no torch. The tokenizer is an argument.
"""
