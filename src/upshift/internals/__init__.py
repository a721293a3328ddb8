"""Hold every name of another library that its makers may take away without notice, in one file for each library."""
