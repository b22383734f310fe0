"""Transports: the interface, its implementations, how ranks meet, and which ranks share a node."""
