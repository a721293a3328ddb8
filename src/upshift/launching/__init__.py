"""Starting `upshift train` on several hosts: commands that are run, and job files for those who schedule them."""
