"""What a tuning is made of: its options, candidates, race, cache and records."""
