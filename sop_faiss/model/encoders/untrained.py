"""The same network with random weights: what an encoder is worth before any training."""

from __future__ import annotations

from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.sop_encoder import SopModel
from sop_faiss.model.encoders.timm_encoder import TimmModel, random_model


def with_random_weights(encoder: Encoder, seed: int) -> Encoder:
    """Make an encoder of the same architecture, preprocessing and pooling, with the random weights that `seed` gives.

    It has the same cache and device, but no whitening, which was learned from other features.
    """
    model: SopModel | TimmModel
    if isinstance(encoder.model, SopModel):
        config = encoder.model.config
        model = SopModel(seeded_backbone(config.model, config.views.global_size, seed), config)
    else:
        like = encoder.model
        model = random_model(like.timm_name, seed, like.position_resize, like.made_with)
    model.eval().requires_grad_(False)
    name = f"{encoder.name} with random weights (seed {seed})"
    untrained = Encoder(model, name, encoder.preprocess, encoder.token_pooling, encoder.token_dimension).eval()
    untrained.cache = encoder.cache
    return untrained.to(next(encoder.parameters()).device)
