"""Frames between ranks: the interface, its implementations, how ranks meet, and which share a node."""
