"""What all tests in this folder may rely on."""

from hypothesis import settings

# How long an example takes is nothing that a test tells: processes share the cores.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
