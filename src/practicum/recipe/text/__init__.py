"""Read and show recipe files: YAML with line numbers, origins of values, error messages."""
