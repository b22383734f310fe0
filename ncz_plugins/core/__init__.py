"""What compression does, apart from any framework: configuration, codec, schedules, communicator.

Imports `ncz_plugins.kernels`, and never an adapter, DeepSpeed, Horovod or CuPy.
"""
