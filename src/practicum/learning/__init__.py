"""The learner: packing, attention over shared prompts, logprobs, optimizer, student, critic, scorers, and
the data-parallel ranks that share them. Tensors come in and go out on the CPU as packed columns.
"""
