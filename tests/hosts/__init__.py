"""A cluster of several hosts on one machine, made of Linux namespaces."""
