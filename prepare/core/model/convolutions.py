"""Classes of convolution modules, as tuples for `isinstance`."""

from torch import nn

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
# Those with a weight of 4 or 5 dimensions: only these have a channels-last format.
CONVOLUTIONS_2D_3D = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
