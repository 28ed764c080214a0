"""`python -m juggler` is the command `juggler`."""

from juggler.cli import command_line

command_line()
