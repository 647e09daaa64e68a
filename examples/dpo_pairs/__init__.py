"""DPO in plain PyTorch: a pair is a group of two; `python -m examples.dpo_pairs` runs it."""
