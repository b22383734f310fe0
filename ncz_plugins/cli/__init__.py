"""The command line: `ncz` and its commands.

main      the parser, and exit codes
settings  from files and options to a configuration
output    sizes, tables, JSON and files, for all commands
machine   facts about this machine
"""
