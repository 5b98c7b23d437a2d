"""The built-in steps, one file each; the registry imports every file here on first use."""
