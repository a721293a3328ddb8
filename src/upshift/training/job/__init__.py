"""A run as a request, and the processes that carry it out."""
