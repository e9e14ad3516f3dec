"""Find combinations of keys that can't work, and keys that would be ignored."""
