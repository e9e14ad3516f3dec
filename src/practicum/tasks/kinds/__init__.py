"""The built-in procedural tasks, a small file for those that are alike; `tasks.builtin` lists them.

Prompts name their task and end with "="; pictures come before that text. Prompts and answers use lowercase
letters, digits, space and the punctuation that the tiny character tokenizer knows. Imported by tasks.builtin
only.
"""
