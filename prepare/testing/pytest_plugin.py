"""Nothing: an editable install of an earlier tree names this module as a plugin of pytest."""
