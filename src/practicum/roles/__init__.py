"""What each stage of a step does, one file per stage; the local and the Ray runtime share these classes."""
