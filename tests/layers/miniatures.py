"""Miniature copies of layers of other libraries: the forward functions of timm, transformers and PyTorch Geometric."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def home(library: str):
    """Give a class the module of a library, as the original has it."""

    def named(kind: type) -> type:
        kind.__module__ = f"{library}.layers"
        return kind

    return named


def pad_same(x, kernel, stride, dilation):
    height, width = (
        max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(x.shape[-2:], kernel, stride, dilation, strict=True)
    )
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


@home("timm")
class Linear(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight, self.bias)


@home("timm")
class Conv2dSame(nn.Conv2d):
    def forward(self, x):
        x = pad_same(x, self.weight.shape[-2:], self.stride, self.dilation)
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class Standardised(nn.Conv2d):
    """Shared part of the four classes below."""

    def __init__(self, *args, same=False, scaled=False, eps=1e-6, **kwargs):
        super().__init__(*args, **kwargs)
        self.eps = eps
        if scaled:
            self.scale = self.weight[0].numel() ** -0.5
            self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        if same:
            self.same_pad = True

    def standardised(self):
        gain = None if "gain" not in self._parameters else (self.gain * self.scale).view(-1)
        rows = self.weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=self.eps).reshape_as(
            self.weight
        )


@home("timm")
class StdConv2d(Standardised):
    def forward(self, x):
        return F.conv2d(x, self.standardised(), self.bias, self.stride, self.padding, self.dilation, self.groups)


@home("timm")
class StdConv2dSame(Standardised):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, same=True, **kwargs)

    def forward(self, x):
        if self.same_pad:
            x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        return F.conv2d(x, self.standardised(), self.bias, self.stride, self.padding, self.dilation, self.groups)


@home("timm")
class ScaledStdConv2d(Standardised):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, scaled=True, **kwargs)

    forward = StdConv2d.forward


@home("timm")
class ScaledStdConv2dSame(Standardised):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, scaled=True, same=True, **kwargs)

    forward = StdConv2dSame.forward


@home("transformers")
class WeightStandardizedConv2d(Standardised):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pad = None

    forward = StdConv2d.forward


@home("timm")
class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, features, act=nn.ReLU):
        super().__init__(features)
        self.drop, self.act = nn.Identity(), act(inplace=True)

    def forward(self, x):
        batch = self.training or not self.track_running_stats
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, batch, 0.1, self.eps)
        return self.act(self.drop(x))


class Grouped(nn.GroupNorm):
    def __init__(self, channels, groups=2):
        super().__init__(groups, channels)


@home("timm")
class GroupNorm(Grouped):
    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


@home("timm")
class GroupNorm1(Grouped):
    def __init__(self, channels):
        super().__init__(channels, 1)

    forward = GroupNorm.forward


@home("timm")
class GroupNormAct(Grouped):
    def forward(self, x):
        return F.gelu(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


@home("timm")
class GroupNorm1Act(GroupNorm1):
    forward = GroupNormAct.forward


@home("timm")
class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


@home("timm")
class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


@home("timm")
class LayerNormAct(nn.LayerNorm):
    def forward(self, x):
        return F.relu(LayerNorm.forward(self, x))


@home("timm")
class LayerNormAct2d(nn.LayerNorm):
    def forward(self, x):
        return F.silu(LayerNorm2d.forward(self, x))


class Scales(nn.Module):
    """A norm of a class of its own."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(features)), eps


@home("timm")
class RmsNorm(Scales):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@home("timm")
class RmsNorm2d(Scales):
    def forward(self, x):
        return RmsNorm.forward(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@home("timm")
class SimpleNorm(Scales):
    def forward(self, x):
        return x * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


@home("timm")
class SimpleNorm2d(Scales):
    def forward(self, x):
        return SimpleNorm.forward(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@home("transformers")
class LlamaRMSNorm(Scales):
    def forward(self, hidden):
        given, hidden = hidden.dtype, hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * hidden.to(given)


@home("transformers")
class GemmaRMSNorm(Scales):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


@home("transformers")
class T5LayerNorm(Scales):
    forward = LlamaRMSNorm.forward


@home("transformers")
class NoNorm(Scales):
    def __init__(self, features, eps=None):
        super().__init__(features, eps)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return x * self.weight + self.bias


class Weights(nn.Module):
    """A linear map of a class of its own."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.in_channels, self.out_channels = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.register_parameter("bias", nn.Parameter(torch.randn(outputs)) if bias else None)


@home("torch_geometric")
class GraphLinear(Weights):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


GraphLinear.__name__ = "Linear"


@home("transformers")
class FalconLinear(nn.Linear):
    def forward(self, input):
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


MINIATURES = [
    Linear(4, 6), Conv2dSame(4, 6, 3, stride=2), StdConv2d(4, 6, 3, padding=1), StdConv2dSame(4, 6, 3, stride=2),
    ScaledStdConv2d(4, 6, 3, groups=2), ScaledStdConv2dSame(4, 6, 3, stride=2), WeightStandardizedConv2d(4, 6, 3),
    BatchNormAct2d(4), BatchNormAct2d(4, nn.SiLU), GroupNorm(4), GroupNorm1(4), GroupNormAct(4), GroupNorm1Act(4),
    LayerNorm(4), LayerNorm2d(4), LayerNormAct(4), LayerNormAct2d(4), RmsNorm(4), RmsNorm2d(4), SimpleNorm(4),
    SimpleNorm2d(4), LlamaRMSNorm(4), GemmaRMSNorm(4), T5LayerNorm(4), NoNorm(4), GraphLinear(4, 6), FalconLinear(4, 6),
]  # fmt: skip
