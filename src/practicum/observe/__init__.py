"""What people see of a run: progress, trackers, tables.

May be imported by trainer and the layers above.
"""
