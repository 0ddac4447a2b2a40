"""Models on this machine: finding a checkpoint, loading it, and the weight formats it is served in."""
