"""What the terminal shows of records."""
