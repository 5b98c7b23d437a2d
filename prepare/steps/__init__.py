"""The built-in steps, one file each; the registry imports every file here on first use."""

# The group of the command line that adds a step: `precision=half`.
GROUP_OF = {
    "device": "device",
    "half": "precision",
    "conv2d_memory_format": "memfmt",
    "conv3d_memory_format": "memfmt",
}
