"""Supervised fine-tuning in plain PyTorch, over several epochs; `python -m examples.sft_warm_start` runs it."""
