"""The commands of the command line. Each imports what it needs when it runs: help comes at once."""
