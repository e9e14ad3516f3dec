"""Teachers: placement, routing of prompts, vocabularies, and the ledger of shares."""
