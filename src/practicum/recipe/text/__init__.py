"""Recipe files and their texts: YAML with line numbers, origins of values, problems in words."""
