"""Asynchronous GRPO on sums of two digits; `make demo` runs it."""
