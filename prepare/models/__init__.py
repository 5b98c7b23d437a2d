"""The example networks that come with prepare; they need nothing but torch."""
