"""Models of segmentation-models-pytorch, torchvision, diffusers and monai, made small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.families import Family
from tests.zoo.torchvision_operators import prepare_torchvision

prepare_torchvision()
SHAPE = (2, 3, 64, 64)
SMALL = (1, 3, 32, 32)


# ---------------------------------------------------------------- segmentation-models-pytorch


def _segment(decoder: str, encoder: str = "tu-test_resnet", **settings: Any) -> nn.Module:
    import segmentation_models_pytorch as smp

    create = getattr(smp, decoder)
    model: nn.Module = create(encoder, encoder_weights=None, in_channels=3, classes=4, **settings)
    return model


def _smp(name: str, *args: Any, shape: tuple[int, ...] = SHAPE, **settings: Any) -> Family:
    return Family(
        f"smp_{name}", "segmentation-models-pytorch", partial(_segment, *args, **settings), shape
    )


NARROW = {"decoder_channels": (32, 24, 16, 8, 8)}

SEGMENTATION = [
    _smp("unet", "Unet", **NARROW),
    _smp("unetplusplus", "UnetPlusPlus", **NARROW),
    _smp("fpn", "FPN", decoder_pyramid_channels=16, decoder_segmentation_channels=32),
    _smp("deeplabv3", "DeepLabV3", "resnet18", decoder_channels=16),
    _smp("deeplabv3plus", "DeepLabV3Plus", "resnet18", decoder_channels=16),
    _smp("manet", "MAnet", decoder_pab_channels=8, **NARROW),
    _smp("pspnet", "PSPNet", psp_out_channels=16),
    _smp("pan", "PAN", "resnet18", shape=(2, 3, 128, 128), decoder_channels=16),
    _smp("linknet", "Linknet"),
    _smp("segformer", "Segformer", decoder_segmentation_channels=16),
    _smp("upernet", "UPerNet", decoder_channels=16),
    _smp("unet_resnet", "Unet", "resnet18", **NARROW),
    _smp("unet_efficientnet", "Unet", "timm-efficientnet-b0", **NARROW),
    _smp("unet_mit", "Unet", "mit_b0", **NARROW),
    _smp("segformer_mit", "Segformer", "mit_b0", decoder_segmentation_channels=16),
    _smp("unet_mobilenet", "Unet", "mobilenet_v2", **NARROW),
    _smp("unet_densenet", "Unet", "densenet121", **NARROW),
    _smp(
        "unet_convnext",
        "Unet",
        "tu-test_convnext",
        encoder_depth=4,
        decoder_channels=(24, 16, 8, 8),
    ),
    _smp("unet_vgg", "Unet", "vgg11_bn", **NARROW),
    _smp("unet_scse", "Unet", decoder_attention_type="scse", decoder_channels=(32, 32, 16, 16, 16)),
    # timm resizes position embeddings in float32.
    replace(
        _smp(
            "dpt_vit",
            "DPT",
            "tu-test_vit",
            shape=(1, 3, 64, 64),
            decoder_intermediate_channels=(8, 8, 8, 8),
            decoder_fusion_channels=8,
            dynamic_img_size=True,
            encoder_depth=4,
            encoder_output_indices=None,
        ),
        tolerance=1e-7,
    ),
]


# ---------------------------------------------------------------- torchvision


def _torchvision(path: str, **settings: Any) -> nn.Module:
    import torchvision

    create: Any = torchvision.models
    for name in path.split("."):
        create = getattr(create, name)
    model: nn.Module = create(**settings)
    return model


def _vision(name: str, path: str, shape: tuple[int, ...] = SHAPE, **settings: Any) -> Family:
    return Family(
        f"torchvision_{name}", "torchvision", partial(_torchvision, path, **settings), shape
    )


NO_WEIGHTS = {"weights": None, "weights_backbone": None, "num_classes": 4}

VISION = [
    _vision("lraspp", "segmentation.lraspp_mobilenet_v3_large", **NO_WEIGHTS),
    _vision("deeplabv3", "segmentation.deeplabv3_mobilenet_v3_large", **NO_WEIGHTS),
    _vision("fcn", "segmentation.fcn_resnet50", **NO_WEIGHTS),
    _vision("resnet", "resnet18", num_classes=4),
    _vision("shufflenet", "shufflenet_v2_x0_5", num_classes=4),
    _vision("squeezenet", "squeezenet1_1", num_classes=4),
    _vision("mnasnet", "mnasnet0_5", num_classes=4),
    _vision("googlenet", "googlenet", aux_logits=False, init_weights=False, num_classes=4),
    _vision(
        "swin",
        "SwinTransformer",
        (1, 3, 56, 56),
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=[7, 7],
        stochastic_depth_prob=0.0,
    ),
    _vision(
        "vit",
        "VisionTransformer",
        image_size=64,
        patch_size=16,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=4,
    ),
    _vision(
        "maxvit",
        "MaxVit",
        input_size=(64, 64),
        stem_channels=8,
        partition_size=2,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
    ),
]


# ---------------------------------------------------------------- diffusers


def _diffusion(name: str, **settings: Any) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**settings)
    return model


def _diffusers(
    name: str,
    model: str,
    others: Callable[[], tuple[Any, ...]] = tuple,
    shape: tuple[int, ...] = SMALL,
    **settings: Any,
) -> Family:
    return Family(
        f"diffusers_{name}", "diffusers", partial(_diffusion, model, **settings), shape, others
    )


def _time() -> tuple[Any, ...]:
    return (torch.tensor([3]),)


def _time_and_text() -> tuple[Any, ...]:
    return torch.tensor([3]), torch.linspace(-1, 1, 5 * 16, dtype=torch.float64).view(1, 5, 16)


def _time_and_class() -> tuple[Any, ...]:
    return torch.tensor([3]), torch.tensor([1])


FIELDS = {"in_channels": 3, "out_channels": 3}
AUTOENCODER = {
    **FIELDS,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
}

DIFFUSION = [
    _diffusers(
        "unet",
        "UNet2DModel",
        _time,
        sample_size=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        norm_num_groups=8,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **FIELDS,
    ),
    _diffusers(
        "unet_condition",
        "UNet2DConditionModel",
        _time_and_text,
        sample_size=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **FIELDS,
    ),
    _diffusers(
        "dit",
        "DiTTransformer2DModel",
        _time_and_class,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        sample_size=32,
        patch_size=4,
        norm_num_groups=4,
        **FIELDS,
    ),
    _diffusers("autoencoder_kl", "AutoencoderKL", **AUTOENCODER),
    _diffusers("vq", "VQModel", **AUTOENCODER),
    _diffusers(
        "unet_scale_shift",
        "UNet2DModel",
        _time,
        sample_size=32,
        block_out_channels=(16, 16, 32),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        norm_num_groups=8,
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        resnet_time_scale_shift="scale_shift",
        downsample_type="resnet",
        upsample_type="resnet",
        **FIELDS,
    ),
]


# ---------------------------------------------------------------- monai


def _medical(name: str, *args: Any, **settings: Any) -> nn.Module:
    import monai.networks.nets as nets

    model: nn.Module = getattr(nets, name)(*args, **settings)
    return model


def _monai(
    name: str, model: str, *args: Any, shape: tuple[int, ...] = SMALL, **settings: Any
) -> Family:
    return Family(f"monai_{name}", "monai", partial(_medical, model, *args, **settings), shape)


PLANE = {"spatial_dims": 2, "in_channels": 3, "out_channels": 2}

MEDICAL = [
    _monai("unet", "UNet", 2, 3, 2, (8, 16, 32), (2, 2), num_res_units=2),
    _monai("dynunet", "DynUNet", 2, 3, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 24]),
    _monai(
        "swinunetr",
        "SwinUNETR",
        shape=(1, 3, 64, 64),
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 2),
        **PLANE,
    ),
    _monai(
        "unetr",
        "UNETR",
        img_size=(32, 32),
        feature_size=8,
        hidden_size=24,
        mlp_dim=48,
        num_heads=4,
        **PLANE,
    ),
    # Biases before norms have gradients of rounding errors alone.
    replace(
        _monai("attention_unet", "AttentionUnet", 2, 3, 2, (8, 16, 32), (2, 2)), tolerance=1e-10
    ),
    _monai("segresnet", "SegResNet", **PLANE),
    _monai(
        "segresnet_ds",
        "SegResNetDS",
        spatial_dims=2,
        in_channels=3,
        out_channels=2,
        init_filters=8,
        blocks_down=(1, 1, 1),
        dsdepth=2,
    ),
    _monai(
        "vnet",
        "VNet",
        shape=(1, 4, 32, 32),
        spatial_dims=2,
        in_channels=4,
        out_channels=2,
    ),
    _monai("basicunet", "BasicUNet", features=(8, 8, 16, 16, 32, 8), **PLANE),
    _monai("basicunetplusplus", "BasicUNetPlusPlus", features=(8, 8, 16, 16, 32, 8), **PLANE),
    _monai(
        "flexible_unet",
        "FlexibleUNet",
        3,
        2,
        "resnet18",
        shape=SHAPE,
        spatial_dims=2,
        decoder_channels=(32, 24, 16, 8, 8),
    ),
    _monai("unet_3d", "UNet", 3, 3, 2, (4, 8, 16), (2, 2), shape=(1, 3, 8, 32, 16)),
    _monai("highresnet", "HighResNet", **PLANE),
    _monai(
        "mednext",
        "MedNeXt",
        spatial_dims=2,
        init_filters=8,
        in_channels=3,
        out_channels=2,
        encoder_expansion_ratio=2,
        decoder_expansion_ratio=2,
        bottleneck_expansion_ratio=2,
        blocks_down=(1, 1),
        blocks_bottleneck=1,
        blocks_up=(1, 1),
    ),
]

FAMILIES = [*SEGMENTATION, *VISION, *DIFFUSION, *MEDICAL]
