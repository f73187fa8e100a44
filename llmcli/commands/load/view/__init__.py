"""The ledger on a terminal."""
