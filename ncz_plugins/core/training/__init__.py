"""What lasts from step to step: policies, error feedback, the guard, statistics and checkpoints."""
