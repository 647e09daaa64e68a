"""The storage node: one arena of extents, and the daemon around it."""
