"""Command line: `ncz` and its commands.

main       the parser of all commands, and exit codes
info       `ncz info`: what this machine has
enable     `ncz enable` and `ncz disable`: scripts that don't import ncz_plugins know it
on_import  the module that `ncz enable` copies into site-packages
patch      `ncz patch`: versions of weights as patches
schema     `ncz schema`: JSON Schema and table of the settings
settings   from files and options to a configuration
loss       what a bound is known to add to the training loss
machine    facts about this machine
output     numbers, tables, JSON and files, for all commands
picture    axes, colours and ticks, for all pictures

check/     `ncz check`: validates a configuration
codec/     `ncz codec`: what an array compresses to
perf/      `ncz perf`: how fast collectives are
plan/      `ncz plan`: predicts whether compression gains
report/    `ncz report`: what the records of a training say
tune/      `ncz tune`: measures, and writes the tuning file
"""
