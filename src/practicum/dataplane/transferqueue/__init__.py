"""The `transferqueue` store: begin with `transferqueue_store`. Nothing outside knows of TransferQueue."""
