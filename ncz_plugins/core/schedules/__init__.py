"""The order in which ranks send frames to each other: ring, direct, and both between nodes only."""
