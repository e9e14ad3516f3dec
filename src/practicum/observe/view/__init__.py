"""`practicum view`: a local web page over run folders, live or finished, or as one file. No torch."""
