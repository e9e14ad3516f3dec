"""Teachers: where each is, which prompts each corrects, its vocabulary, and the ledger of shares."""
