"""Asking the model: engines, the Ray fleet, and the ledger of outcomes."""

INTERVENTION_VERSION = 1
"""Raised whenever an engine's outcome for the same request may change by more than batches make it; part of every
ledger key."""
