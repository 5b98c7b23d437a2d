"""What a bench is made of: its records, its statistics, its inputs, and the models it times."""
