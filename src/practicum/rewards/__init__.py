"""Reward models: a classifier or a prompted judge, placed like a teacher.

May be imported by serving, roles and the layers above.
"""
