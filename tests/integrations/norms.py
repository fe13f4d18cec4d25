"""Norm modules for tests of patch: some that tilenorm can compute, and some that it cannot."""

import torch
import torch.nn.functional as F
from torch import nn

N = 24


def rms(x, eps, dims=-1):
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


class Custom(nn.Module):
    """RMSNorm in float32, rounded at the end. The subclasses below each change one thing."""

    def __init__(self, shape=N):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = 1e-6

    def forward(self, x):
        return (rms(x.float(), self.eps) * self.weight).to(x.dtype)


class Scale(nn.Module):
    """RMSNorm whose class and parameter names do not say so. The bias is the first parameter."""

    def __init__(self):
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(N))
        self.epsilon = 1e-6

    def forward(self, tokens):
        return (rms(tokens.float(), self.epsilon) * (1 + self.gain.float()) + self.shift).type_as(
            tokens
        )


class HardCodedNorm(Custom):
    def __init__(self):
        super().__init__()
        del self.eps

    def forward(self, x):
        return F.rms_norm(x, (N,), self.weight, 1e-8)


class Float32LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class SameLayerNorm(nn.LayerNorm):
    pass


class GatedNorm(Custom):
    def forward(self, x, z=None):
        y = rms((x if z is None else x * F.silu(z.float())).float(), self.eps)
        return (y * self.weight).to(x.dtype)


class SigmoidGatedLayerNorm(nn.LayerNorm):
    def forward(self, x, z):
        y = F.layer_norm(x.float(), self.normalized_shape, None, None, self.eps)
        y = y * self.weight.float() + self.bias.float()
        return (y * torch.sigmoid(z.float())).to(x.dtype)


# tilenorm computes none of the modules below.


class DetachedLayerNorm(Custom):
    """In float32 its outputs are those of a LayerNorm, but its gradients are not."""

    def forward(self, x):
        x = x.float() - x.float().mean(-1, keepdim=True).detach()
        return (rms(x, self.eps) * self.weight).type_as(x)


class FrozenRMSNorm(Custom):
    def forward(self, x):
        return rms(x, self.eps) * self.weight.detach()


class ScaledRMSNorm(Custom):
    def forward(self, x):
        return rms(x, self.eps) * self.weight * 1.00001


class OuterEpsRMSNorm(Custom):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class OtherEpsRMSNorm(Custom):
    def forward(self, x):
        return rms(x, 2 * self.eps) * self.weight


class BatchRMSNorm(Custom):
    def forward(self, x):
        return rms(x, self.eps, (0, -1)) * self.weight


class NoisyRMSNorm(Custom):
    def forward(self, x):
        return F.dropout(rms(x, self.eps) * self.weight, 0.1, self.training)


class CoarseRMSNorm(Custom):
    """With a 16-bit input, every operation rounds to 16 bits."""

    def forward(self, x):
        return rms(x, self.eps) * self.weight


class Float32OutputRMSNorm(Custom):
    def forward(self, x):
        return rms(x.float(), self.eps) * self.weight


class RoundedOffsetRMSNorm(Custom):
    """With a 16-bit weight, 1 + weight is rounded to 16 bits. Gemma computes it in float32."""

    def forward(self, x):
        return (rms(x.float(), self.eps) * (1 + self.weight)).to(x.dtype)


class UnbiasedLayerNorm(Custom):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class ChannelsFirstRMSNorm(Custom):
    def forward(self, x):
        if x.dim() < 4:
            return rms(x, self.eps) * self.weight
        return rms(x, self.eps, 1) * self.weight[:, None, None]


class GroupedRMSNorm(Custom):
    def forward(self, x):
        groups = x.reshape(*x.shape[:-1], 3, -1)
        return rms(groups, self.eps).reshape(x.shape) * self.weight


class PoolingRMSNorm(Custom):
    def forward(self, x):
        return (rms(x, self.eps) * self.weight).mean(-2)


class ResidualRMSNorm(Custom):
    def forward(self, x, residual):
        return rms(x + residual, self.eps) * self.weight


class FlagRMSNorm(Custom):
    def forward(self, x, flip=False):
        return rms(x, self.eps) * (-self.weight if flip else self.weight)


class TwoOutputsRMSNorm(Custom):
    def forward(self, x):
        return rms(x, self.eps) * self.weight, x


class NestedRMSNorm(Custom):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(N, N)


class BufferRMSNorm(Custom):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class PlainTensorRMSNorm(Custom):
    def __init__(self):
        super().__init__()
        del self.weight
        self.weight = torch.ones(N)


class ManyParametersRMSNorm(Custom):
    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Parameter(torch.ones(2))


def replaced_forward():
    module = Custom()
    module.forward = lambda x: x
    return module
