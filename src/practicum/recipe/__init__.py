"""What the user asked for: typed, validated, explained, and free of torch.

May be imported by dataplane, algorithms, processes and the layers above.
"""
