"""The simulator: the real scheduler and cache accounting, driven by a clock. May import bench's files without torch."""
