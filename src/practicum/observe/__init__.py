"""What people see of a run: progress, trackers, tables, the demo.

May be imported by trainer and cli.
"""
