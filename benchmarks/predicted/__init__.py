"""Rows of the ledger beside what hone's estimates say of them: configurations, rates, estimates, and new rows measured with all three."""
