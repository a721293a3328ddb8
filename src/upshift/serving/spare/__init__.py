"""Keep spare processes for engines that die."""
