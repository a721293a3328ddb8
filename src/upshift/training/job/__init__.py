"""Define a run as a request, and start the processes that carry it out."""
