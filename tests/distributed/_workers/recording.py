"""Each rank records one all-reduce and leaves the events. Usage: recording.py NUMEL"""

import sys

import torch.distributed as dist
from common import digest, finish, start, values

from ncz_plugins import Communicator
from ncz_plugins.core.runtime.device import has_spare_core
from ncz_plugins.core.runtime.trace import recording

rank, _ = start()
transport = {"min_bytes": 0, "frame_bytes": 262144, "hierarchy": "off"}
communicator = Communicator({"quantizer": {"kind": "error_bound"}, "transport": transport})
tensor = values(rank, int(sys.argv[1]))
unrecorded = tensor.clone()
communicator.all_reduce(unrecorded)
dist.barrier()
with recording() as events:
    communicator.all_reduce(tensor)
finish({"events": events, "digests": [digest(tensor), digest(unrecorded)], "two threads": has_spare_core()})
