"""The run: the step, the replay buffer, evaluation, checkpoints, metrics. Start with `step.py`.

May be imported by api, view and the layers above.
"""
