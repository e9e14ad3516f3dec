"""The learner: packing, attention over shared prompts, logprobs, optimizer, student, critic, scorers.

One process, one device; tensors come in and go out on the CPU as packed columns.
May be imported by runtime, checks, observe, trainer and cli.
"""
