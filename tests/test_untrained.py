"""The same network with random weights, for every kind of encoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.untrained import with_random_weights


def test_of_a_timm_model_it_is_what_random_weights_gives() -> None:
    spec = EncoderSpec("timm:test_resnet", random_weights=3, size=32, pooling="gem", scales=(1.0, 0.5))
    trained = encoder_of_spec(spec)
    untrained = with_random_weights(trained, 5)
    assert untrained.fingerprint == encoder_of_spec(replace(spec, random_weights=5)).fingerprint
    assert (untrained.preprocess, untrained.pooling) == (trained.preprocess, trained.pooling)
    assert with_random_weights(trained, 3).fingerprint == trained.fingerprint


def test_of_a_configuration_it_is_what_training_starts_from() -> None:
    trained = encoder_of_spec(EncoderSpec("config:digits_demo", random_weights=3))
    assert with_random_weights(trained, 3).fingerprint == trained.fingerprint
    assert with_random_weights(trained, 4).fingerprint != trained.fingerprint


def test_a_grid_of_positions_follows_the_file(tmp_path) -> None:
    vit = timm.create_model("test_vit", pretrained=False, img_size=64, num_classes=0)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    spec = EncoderSpec("timm:test_vit", weights=tmp_path / "vit.safetensors", size=64)
    trained = encoder_of_spec(spec)
    untrained = with_random_weights(trained, 0)
    shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (trained, untrained)]
    assert shapes[0] == shapes[1]
    state = torch.get_rng_state()
    image = np.zeros((64, 64, 3), np.uint8)
    assert not np.array_equal(trained.encode([image]), untrained.encode([image]))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("whitened", [False, True])
def test_the_whitening_stays_behind(whitened: bool) -> None:
    encoder = encoder_of_spec(EncoderSpec("timm:test_resnet", random_weights=0, size=32))
    if whitened:
        encoder.whitening = object()  # type: ignore[assignment]  # of other features
    assert with_random_weights(encoder, 0).whitening is None
