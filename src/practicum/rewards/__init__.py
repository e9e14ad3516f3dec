"""Reward functions and reward models: a classifier or a prompted judge, placed like a teacher."""
