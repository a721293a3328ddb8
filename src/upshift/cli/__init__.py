"""The command line: parses, calls, prints. No arithmetic beyond what a table shows."""
