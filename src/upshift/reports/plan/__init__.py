"""The page of a planning: everything that ``upshift plan`` prints, drawn, in one file."""
