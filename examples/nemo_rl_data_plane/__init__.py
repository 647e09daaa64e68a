"""NeMo-RL's data flow over its `DataPlaneClient`; `python -m examples.nemo_rl_data_plane` runs it."""
