"""Batches by reference over ROLL's transfer backend; `python -m examples.roll_transfer_backend`."""
