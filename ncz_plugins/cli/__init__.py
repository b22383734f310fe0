"""The `ncz` command: a module for each subcommand, `main` for all of them, `output` for how they print."""
