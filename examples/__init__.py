"""Programs that show the data plane at work."""
