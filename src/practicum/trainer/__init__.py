"""The run: the step, the replay buffer, evaluation, checkpoints, metrics. Start with `step.py`."""
