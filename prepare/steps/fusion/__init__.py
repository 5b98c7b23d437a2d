"""Folding batch norms into convolutions, for the step fuse_conv_bn."""
