"""The help pages of the commands, and the messages about wrong options."""
