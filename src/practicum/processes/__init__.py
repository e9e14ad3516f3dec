"""Processes of our own: a model or an engine apart from this process, asked through a pipe.

May be imported by rollout, teachers, runtime and what is above them.
"""
