"""What the commands print: tables and pages for a terminal."""
