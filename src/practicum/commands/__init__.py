"""The commands of the command line. Each imports its dependencies when it runs, so that --help is fast."""
