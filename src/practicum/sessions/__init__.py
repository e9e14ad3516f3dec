"""Practice: engines that sample and score (tokens in, tokens out), sessions, agent loops.

May be imported by runtime, checks, observe, trainer and cli.
"""
