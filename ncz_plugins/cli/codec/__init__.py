"""`ncz codec`: what an array compresses to, and how fast.

command       the options, and the run from start to output
array_file    reader of .npy files
round_trip    the array compressed and decompressed: ratio, errors, coders
block_errors  errors and bounds of blocks
entropy       entropy of codes
speed         speed of encoding and decoding, compared with memcpy
show          the printed output, and JSON
plot          the picture of ratio against bound
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
