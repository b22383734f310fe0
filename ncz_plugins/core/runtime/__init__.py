"""Devices, the background thread, traces and counters."""
