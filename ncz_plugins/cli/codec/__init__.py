"""`ncz codec`: what an array would compress to, and how fast.

command       the options
array_file    the array, from an .npy file
round_trip    the array compressed and decompressed: ratio, errors, coders
block_errors  errors and bounds of blocks
entropy       of the codes
speed         how fast frames are made and read, beside memcpy
libraries     other compressors, for --compare
show plot     what people see
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
