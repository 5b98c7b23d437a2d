"""Fuse batch norms into convolutions: the parts of the step fuse_conv_bn."""
