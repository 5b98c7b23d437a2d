"""The base that every part of prepare builds on; it imports nothing from them."""
