"""Start `upshift train` on several hosts: run the commands, or write job files for a scheduler."""
