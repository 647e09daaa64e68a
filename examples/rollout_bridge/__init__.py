"""A Megatron-shaped trainer fed over the rollout bridge, on CPU; `python -m examples.rollout_bridge` runs it."""
