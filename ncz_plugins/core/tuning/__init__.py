"""Measuring link and coders, and choosing settings by what was measured."""
