"""What the user asked for: typed, validated, explained, and free of torch."""
