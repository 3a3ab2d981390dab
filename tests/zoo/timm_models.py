"""Models of timm, most with features instead of a class: blocks of the originals, made small."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.families import Family

SHAPE = (2, 3, 64, 64)


def _create(name: str, **settings: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **settings)
    return model


def _features(name: str, model: str, shape: tuple[int, ...] = SHAPE, **settings: Any) -> Family:
    """Return a family whose outputs are the fields of all levels."""
    return Family(name, "timm", partial(_create, model, features_only=True, **settings), shape)


def _classes(name: str, model: str, shape: tuple[int, ...] = SHAPE, **settings: Any) -> Family:
    """Return a family whose output is a class per sample."""
    return Family(name, "timm", partial(_create, model, num_classes=5, **settings), shape)


def _module(name: str, module: str, kind: str, **settings: Any) -> Family:
    """Return a family of a class whose settings `create_model` does not take."""

    def build() -> nn.Module:
        models = importlib.import_module(f"timm.models.{module}")
        model: nn.Module = getattr(models, kind)(num_classes=5, **settings)
        return model

    return Family(name, "timm", build, SHAPE)


QUAD = {"depths": (1, 1, 1, 1)}
DIMS = (8, 16, 24, 32)

FAMILIES = [
    _features("timm_resnet", "resnet10t"),
    _features("timm_resnet_small", "test_resnet"),
    _features("timm_convnext", "convnext_atto", dims=DIMS, **QUAD),
    _features("timm_efficientnet", "test_efficientnet"),
    _features("timm_efficientnet_b0", "efficientnet_b0"),
    _features("timm_regnet", "regnety_002"),
    _features("timm_densenet", "densenet121", growth_rate=4, block_config=(2, 2, 2, 2)),
    _features("timm_mobilenetv3", "mobilenetv3_small_050"),
    _features("timm_mobilenetv2", "mobilenetv2_035"),
    _features("timm_hrnet", "hrnet_w18_small"),
    _features("timm_res2net", "res2net50_26w_4s", layers=(1, 1, 1, 1)),
    _features("timm_dpn", "dpn48b"),
    _features("timm_vgg", "vgg11"),
    _features("timm_ghostnet", "ghostnet_050"),
    _features("timm_inception_next", "inception_next_atto"),
    _features("timm_hgnet", "hgnetv2_b0"),
    _features("timm_fastvit", "fastvit_t8"),
    _features("timm_repvit", "repvit_m0_9"),
    _features("timm_mambaout", "test_mambaout"),
    _features("timm_nfnet", "test_nfnet"),
    _features("timm_byobnet", "test_byobnet"),
    _features("timm_dla", "dla46_c"),
    _features("timm_xception", "xception41"),
    _features("timm_selecsls", "selecsls42"),
    _features("timm_lambda", "lambda_resnet26t"),
    _features("timm_botnet", "botnet26t_256", img_size=64),
    _features(
        "timm_swin",
        "swin_tiny_patch4_window7_224",
        (1, 3, 56, 56),
        img_size=56,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _features(
        "timm_swin_deep",
        "swin_tiny_patch4_window7_224",
        (1, 3, 56, 56),
        img_size=56,
        embed_dim=12,
        depths=(2, 2, 2, 2),
        num_heads=(2, 2, 2, 2),
    ),
    _features(
        "timm_swinv2",
        "swinv2_tiny_window8_256",
        img_size=64,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _features(
        "timm_swinv2_cr",
        "swinv2_cr_tiny_224",
        img_size=64,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _features("timm_pvt", "pvt_v2_b0", embed_dims=(8, 16, 40, 64), **QUAD),
    _features("timm_davit", "davit_tiny", embed_dims=DIMS, num_heads=(2, 2, 2, 2), **QUAD),
    _features("timm_edgenext", "edgenext_xx_small", dims=DIMS, depths=(2, 2, 2, 2)),
    _features("timm_maxvit", "test_maxvit", img_size=64),
    _features("timm_coatnet", "test_coatnet", img_size=64),
    _features("timm_mobilevit", "mobilevit_xxs"),
    _features("timm_mobilevitv2", "mobilevitv2_050"),
    _features("timm_tiny_vit", "tiny_vit_5m_224", embed_dims=DIMS, num_heads=(1, 2, 2, 2), **QUAD),
    _features("timm_swiftformer", "swiftformer_xs"),
    _features("timm_mvitv2", "mvitv2_tiny", img_size=64),
    _features("timm_gcvit", "gcvit_xxtiny", img_size=64, embed_dim=16),
    _classes("timm_vit", "vit_tiny_patch16_224", img_size=64, embed_dim=24, depth=2, num_heads=2),
    _classes("timm_vit_small", "test_vit", img_size=64),
    _classes(
        "timm_deit3", "deit3_small_patch16_224", img_size=64, embed_dim=24, depth=2, num_heads=2
    ),
    _classes("timm_beit", "beit_base_patch16_224", img_size=64, embed_dim=24, depth=2, num_heads=2),
    _classes(
        "timm_eva02",
        "eva02_tiny_patch14_224",
        (1, 3, 56, 56),
        img_size=56,
        embed_dim=24,
        depth=2,
        num_heads=2,
    ),
    _classes("timm_twins", "twins_svt_small", img_size=64, embed_dims=DIMS, **QUAD),
    _classes("timm_xcit", "xcit_nano_12_p16_224", depth=2, embed_dim=16, num_heads=2),
    _classes("timm_levit", "levit_128s", img_size=64),
    _classes(
        "timm_crossvit",
        "crossvit_tiny_240",
        (1, 3, 240, 240),
        embed_dim=(12, 24),
        depth=((1, 1, 0),),
        num_heads=(2, 2),
    ),
    _classes("timm_cait", "cait_xxs24_224", img_size=64, depth=2, embed_dim=24, num_heads=2),
    _classes(
        "timm_sequencer",
        "sequencer2d_s",
        img_size=56,
        layers=(1, 1),
        patch_sizes=(7, 2),
        embed_dims=(12, 24),
        hidden_sizes=(6, 6),
        mlp_ratios=(2.0, 2.0),
    ),
    _classes(
        "timm_visformer", "visformer_tiny", img_size=64, embed_dim=32, depth=(1, 1, 1), num_heads=2
    ),
    _classes(
        "timm_convit",
        "convit_tiny",
        img_size=64,
        embed_dim=24,
        depth=2,
        num_heads=2,
        local_up_to_layer=1,
    ),
    _classes(
        "timm_tnt", "tnt_s_legacy_patch16_224", img_size=64, embed_dim=24, inner_dim=8, depth=2
    ),
    _classes(
        "timm_coat", "coat_lite_tiny", img_size=64, embed_dims=DIMS, serial_depths=(1, 1, 1, 1)
    ),
    _module("timm_focalnet", "focalnet", "FocalNet", embed_dim=12, **QUAD),
    _module("timm_poolformer", "metaformer", "MetaFormer", dims=DIMS, **QUAD),
    _module("timm_mixer", "mlp_mixer", "MlpMixer", img_size=64, num_blocks=2, embed_dim=24),
    _module(
        "timm_nest",
        "nest",
        "Nest",
        img_size=64,
        embed_dims=(8, 16, 24),
        num_heads=(1, 2, 2),
        depths=(1, 1, 1),
    ),
    _module(
        "timm_convmixer", "convmixer", "ConvMixer", dim=16, depth=2, kernel_size=5, patch_size=4
    ),
    _module(
        "timm_volo",
        "volo",
        "VOLO",
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 24, 24, 24),
        num_heads=(2, 2, 2, 2),
    ),
    # Its linear attention computes in float32.
    replace(_features("timm_efficientvit", "efficientvit_b0"), tolerance=1e-4),
    # Its stages multiply branches, and the batch norms of the last ones see few values.
    replace(_features("timm_starnet", "starnet_s1"), tolerance=1e-9),
]
