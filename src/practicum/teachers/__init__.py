"""Teachers: which one corrects which prompt, whether its vocabulary fits, and the ledger of shares.

Where they live is in `places`. May be imported by serving, roles and the layers above.
"""
