"""Networks with more methods than forward."""

from torch import Tensor, nn


class Coder(nn.Module):
    """Encodes videos and decodes latents; its forward takes videos, of three channels, only."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Conv3d(3, width, 3, padding=1)
        self.norm = nn.InstanceNorm3d(3)
        self.decoder = nn.Conv3d(width, 3, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, latents: Tensor, *, scale: float = 1.0) -> tuple[Tensor]:
        return (self.norm(self.decoder(latents.repeat(1, 1, 1, 1, 2))) * scale,)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))[0]
