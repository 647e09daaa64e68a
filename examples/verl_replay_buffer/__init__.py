"""A replay-buffer loop in the shape of verl's, written against TransferQueue's key-value interface."""
