"""The example networks of prepare; they require torch only."""
