"""The record of a run: rows with all their columns and the timeline of stages, written by whoever holds them.

`recorder` and `recording_store` write, `read_record` and `compare_runs` read; those who read import no torch.
May be imported by tasks, engines and the layers above.
"""
