"""Prompts and their rewards: dataset files, built-in tasks, the prompt stream, reward functions.

Imports no torch: a tokenizer comes in as an argument.
May be imported by sessions, learning, places and the layers above.
"""
