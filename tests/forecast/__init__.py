"""Tests of practicum.forecast."""
