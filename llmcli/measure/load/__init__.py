"""Loading, looked at: the ledger, the time, the numbers, and what a file claims."""
