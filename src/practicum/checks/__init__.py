"""Invariants watched at run time: on by default, cheap, each with a name and a sentence when it fires.

Imports recipe and dataplane only; may be imported by runtime and everything above it.
"""
