"""The built-in steps, one file each; every file here is imported when steps are first asked for."""
