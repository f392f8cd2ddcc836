"""Convolutional networks that the papers of planners plan for, for `meshcast plan-module`: 32 images of 224 x 224.

AlexNet (arXiv 1404.5997), VGG-16 (arXiv 1409.1556), ResNet-50 (arXiv 1512.03385), and the Wide-ResNet of Alpa
(arXiv 2201.12023, table 5), whose second convolution of a block is wider by a factor:

    meshcast plan-module examples/modules/convolutional.py:vgg16 --with pipedream,dapple --cluster p3:2 --depth 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGES, CLASSES = 32, 1000


def images() -> tuple[Tensor]:
    return (torch.zeros(IMAGES, 3, 224, 224),)


def classifier(inputs: int) -> nn.Sequential:
    """Two hidden layers of 4096, as in AlexNet and VGG."""
    hidden = [nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(4096, CLASSES))


def alexnet() -> tuple[nn.Module, tuple[Tensor]]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for inputs, outputs in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(3, 2), classifier(256 * 6 * 6)), images()


def vgg16() -> tuple[nn.Module, tuple[Tensor]]:
    layers: list[nn.Module] = []
    inputs = 3
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
            inputs = channels
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, classifier(512 * 7 * 7)), images()


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, and a shortcut."""

    def __init__(self, inputs: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = (
            (inputs, channels, 1, 1),
            (channels, channels * width, 3, stride),
            (channels * width, channels * 4, 1, 1),
        )
        parts: list[nn.Module] = []
        for source, target, kernel, step in sizes:
            parts += [
                nn.Conv2d(source, target, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(target),
                nn.ReLU(),
            ]
        self.convolutions = nn.Sequential(*parts[:-1])
        self.shortcut = None
        if stride > 1 or inputs != channels * 4:
            conv = nn.Conv2d(inputs, channels * 4, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels * 4))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        result: Tensor = self.activation(self.convolutions(x) + shortcut)
        return result


def make_resnet(channels: int = 64, width: int = 1, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """A ResNet of bottlenecks; its depth is 3 times the sum of `depths`, and 2."""
    stem = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    inputs = channels
    for stage, count in enumerate(depths):
        for place in range(count):
            blocks.append(Bottleneck(inputs, channels * 2**stage, width, 2 if stage > 0 and place == 0 else 1))
            inputs = channels * 2**stage * 4
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(nn.Sequential(*stem), *blocks, nn.Sequential(*end))


def resnet50() -> tuple[nn.Module, tuple[Tensor]]:
    return make_resnet(), images()


def wide_resnet_1b() -> tuple[nn.Module, tuple[Tensor]]:
    return make_resnet(channels=320, width=2), images()


def wide_resnet_4b() -> tuple[nn.Module, tuple[Tensor]]:
    return make_resnet(channels=640, width=2), images()
