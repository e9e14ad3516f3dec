"""What can't work together, and what would be ignored in silence."""
