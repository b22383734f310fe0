"""What a tuning file and `auto` come to under Horovod. usage: horovod_tuning.py TUNED.json"""

import sys

import horovod.torch as hvd
from horovod_common import own_values, save, sha256

import ncz_plugins.horovod as ncz
from ncz_plugins import NczError

SIZE = 300_000
OPEN = {"frame_bytes": "auto", "min_bytes": "auto"}


def error_of(transport: dict) -> list[str]:
    try:
        ncz.NCZ(transport=transport)
    except NczError as error:
        return [type(error).__name__, str(error)]
    return []


hvd.init()
compressor = ncz.NCZ(transport={"tuning": sys.argv[1], **OPEN})
result = ncz.allreduce(own_values(SIZE), name="tuned", compression=compressor)
save(
    {
        "config": compressor.config.canonical(),
        "sha256": sha256([result]),
        "calls": compressor.stats.total.calls,
        "compressed": compressor.stats.total.compressed_calls,
        "bypasses": compressor.stats.total.bypasses,
        "auto": error_of(OPEN),
        "missing": error_of({"tuning": "nowhere.json"}),
    }
)
hvd.shutdown()
