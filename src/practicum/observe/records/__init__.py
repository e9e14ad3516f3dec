"""The record of a run: rows with all their columns and the timeline of stages, written by whoever holds them.

`recorder` writes, `read_record` and `compare_runs` read. Those who read import no torch.
"""
