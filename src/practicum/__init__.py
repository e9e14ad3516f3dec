"""practicum post-trains language models: reinforcement learning and on-policy distillation in one trainer."""

__version__ = "0.1.0"
