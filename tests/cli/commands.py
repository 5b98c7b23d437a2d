"""Words of the command line that name a small network and its input."""

NET = "model._target_=sample_nets.Net"
SMALL = "input.shape=[2,3,16,16]"
UNET3D = ("model=unet3d", "model.width=2", "model.depth=2", "input.shape=[2,1,8,8,8]")
