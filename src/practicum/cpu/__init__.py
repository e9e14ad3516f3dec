"""Kernels for CPUs: the same bits in any batch, in learner and engines, and faster than torch's own modules.

`switch.ENABLED` turns all of them off. Then models compute by transformers, PEFT and torch alone.
"""
