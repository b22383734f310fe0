"""Measurement of link and coders, and the settings that follow from it.

measure      measures link, coders and all-reduces on all ranks
decisions    chooses schedule, frame size, connections and smallest size from measurements
tuning_file  the file that `ncz tune` writes: measurements and choices
"""
