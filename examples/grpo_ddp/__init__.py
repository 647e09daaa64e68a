"""GRPO in plain PyTorch: a `StreamingLoader` and DistributedDataParallel; `python -m examples.grpo_ddp` runs it."""
