"""ALiBi (Press et al. 2022): a head's scores fall along a line with the distance."""

import torch
from torch import Tensor, nn

from txl_dist import plugins
from txl_dist.config.schema import ModelSection
from txl_dist.model.attention import RelativeEncodings


class LinearDistances(nn.Module):
    """One layer's distances: no vectors, and a number per distance and head."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.head_width = model.head_width
        head_N = torch.arange(1, model.num_heads + 1, dtype=torch.float32)
        # A buffer that follows from the settings: a checkpoint does not hold it.
        self.register_buffer("slope_N", 2 ** (-8 * head_N / model.num_heads), persistent=False)

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> RelativeEncodings:
        """Return the distances K-1 ... 0."""
        slope_N = self.slope_N
        assert isinstance(slope_N, Tensor)
        distance_K = torch.arange(num_distances - 1, -1, -1, dtype=torch.float32, device=slope_N.device)
        # Scores are divided by the square root of the head's width; ALiBi adds its numbers after that.
        bias_KN = -distance_K[:, None] * slope_N.float() * self.head_width**0.5
        key_KNH = torch.zeros(num_distances, len(slope_N), self.head_width, device=slope_N.device)
        return RelativeEncodings(key_KNH.to(slope_N.dtype), bias_KN.to(slope_N.dtype))


plugins.register_positions("alibi", LinearDistances)
