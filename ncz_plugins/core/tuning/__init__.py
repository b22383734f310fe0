"""Tuning: measurement of link and coders, and the settings that follow from it.

- decisions.py: schedule, frame size, connections and smallest size, chosen from measurements.
- measure.py: measurement of the link, the coders and all-reduces, on all ranks.
- tuning_file.py: the file that `ncz tune` writes, with measurements and choices.
"""
