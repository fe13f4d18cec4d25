"""Norm modules for tests of patch, beside those that drawn_norms draws."""

import torch
import torch.nn.functional as F
from torch import nn

N = 24


def rms(x, eps, dims=-1):
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


class Custom(nn.Module):
    """RMSNorm in float32, rounded at the end."""

    def __init__(self, shape=N):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = 1e-6

    def forward(self, x):
        return (rms(x.float(), self.eps) * self.weight).to(x.dtype)


class UnitOffset(Custom):
    """litgpt's RMSNorm of Gemma: 1 + weight is rounded to the weight's dtype."""

    def forward(self, x):
        dtype = x.dtype
        normed = rms(x.float(), self.eps)
        weight = 1 + self.weight
        return (normed * weight.float()).to(dtype=dtype)


class GainCenter(nn.RMSNorm):
    """torchtitan's RMSGainCenterNorm."""

    def __init__(self, gain_center):
        super().__init__(N, eps=1e-6)
        self.gain_center = gain_center

    def forward(self, x):
        weight = self.weight + self.gain_center
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Scale(nn.Module):
    """RMSNorm whose class and parameter names do not say so. The bias is the first parameter."""

    def __init__(self):
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(N))
        self.epsilon = 1e-6

    def forward(self, tokens):
        y = rms(tokens.float(), self.epsilon) * (1 + self.gain.float()) + self.shift
        return y.type_as(tokens)
