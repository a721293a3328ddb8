"""Reports as HTML pages. Modules decide what a page says, in plain data; the templates decide how it looks."""
