"""One module per column kind: how it is measured, sliced, written and read back."""
