"""Schedules: which rank sends which frames to which other rank, in which order. They know neither devices nor coders.

- choice.py: the schedule that `auto` picks.
- direct.py: all-to-all to the owners of segments, then all-gather. For few ranks.
- exchange.py: each rank sends each other rank a piece, and nothing is summed.
- fixed_rate.py: the same for codes with a fixed number of bits, by uncompressed collectives.
- halving.py: ranks exchange halves of what they have left, with few others. For many ranks.
- hierarchy.py: plain inside a node, and one of the other schedules between nodes.
- padded.py: the sums of `direct` for two ranks with GPUs, without waits of the host.
- ring.py: each rank sends to its right neighbor only.
"""
