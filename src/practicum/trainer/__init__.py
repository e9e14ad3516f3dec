"""Run a recipe: steps, sampling ahead, evaluation, checkpoints and metrics. Start with `step.py`."""
