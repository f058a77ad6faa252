"""The command line: a command is its flags and its action."""
