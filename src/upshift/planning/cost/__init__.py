"""What a plan costs: allocated memory, held memory, time."""
