"""What the user asked for: typed, validated, explained, and free of torch.

Everything may import this folder; it imports nothing of practicum but `errors`.
"""
