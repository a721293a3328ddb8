"""Every name of another library that its makers may take away without notice: one file for each library."""
