"""Hold the engines that encode images and sounds, one file an engine."""
