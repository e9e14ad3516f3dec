"""`practicum view`: a local web page over run folders, live or finished, or as one file. No torch.

May be imported by parts, commands and the layers above.
"""
