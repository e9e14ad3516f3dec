"""Reward functions and reward models (classifiers and prompted judges)."""
