"""Runtime: devices, threads and handles that carry out calls, and counters and recordings of calls.

- device.py: kernels, memory for frames, and waiting, for host memory and for one GPU.
- forecast.py: the expected lengths of frames on a GPU.
- handle.py: what an asynchronous collective returns: `wait`, `get_future`, and several handles as one.
- inference_mode.py: leaving torch's inference mode, in which evaluation makes calls.
- process.py: threads, what the process finishes before it ends, and what its forks close or keep.
- recorded.py: calls on a GPU whose launches are recorded and replayed.
- statistics.py: counters of bytes, calls and seconds, by call, step and run.
- stream.py: calls that a GPU carries out without the host, and the rules for CUDA graphs.
- trace.py: spans of time: counted, shown in Nsight Systems, and recorded as Chrome traces.
- worker.py: the background thread that runs collectives in order, and the threads that run callbacks.
"""
