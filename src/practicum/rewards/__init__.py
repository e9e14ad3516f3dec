"""Reward models: a classifier or a prompted judge, placed like a teacher. May be imported as teachers may."""
