"""The learner: packing, logprobs, optimizer, student, critic, scorers and data-parallel ranks. Inputs and
outputs are packed columns on the CPU.
"""
