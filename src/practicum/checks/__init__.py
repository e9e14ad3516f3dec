"""Invariants watched at run time: on by default, cheap, each with a name and a sentence when it fires."""
