"""Stages of a step, one file per stage, shared by the local and the Ray runtime."""
