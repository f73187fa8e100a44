"""Loading observed: ledger, time, numbers, and what a file claims."""
