"""Features under many settings, against one extraction for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.data.images.source import open_source
from sop_faiss.evaluate import encoder_settings
from sop_faiss.evaluate.encoder_settings import possible_settings, setting_features
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.pooling import split_pooling
from sop_faiss.model.encoders.spec import EncoderSpec
from tests.images import write_folder

MODELS = [
    EncoderSpec("timm:test_resnet", random_weights=0, size=32),
    EncoderSpec("timm:test_vit", random_weights=0, size=64, pooling="cls"),
    EncoderSpec("config:digits_demo", random_weights=0),
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "photos", classes=2, per_class=6, size=80, prefix="")
    (folder / "0" / "broken.jpg").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.model)
def test_each_setting_is_what_an_extraction_gives(
    photos: Path, spec: EncoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_settings, "_LAST_BLOCKS", 2)
    encoder, source = encoder_of_spec(spec), open_source(photos)
    settings = possible_settings(encoder)
    own = settings[0]
    assert (own.size, own.scales, own.pooling) == (encoder.preprocess.crop, (1.0,), encoder.token_pooling)
    assert len({setting.size for setting in settings}) == 3 and len({setting.scales for setting in settings}) == 2
    assert any("_last2" in setting.pooling for setting in settings) == ("resnet" not in spec.model)
    found = setting_features(encoder, source, settings, views=False)
    assert len(found.bad) == 1 and len(found.positions) == 12
    for setting in settings[::4]:
        pooling, blocks = split_pooling(setting.pooling)
        last = blocks if blocks > 1 else None
        changed = {"size": setting.size, "scales": setting.scales, "pooling": pooling, "last_blocks": last}
        alone = encoder_of_spec(EncoderSpec(**{**spec.__dict__, **changed}))
        store = extract_features(alone, source, ExtractionOptions(max_bad_fraction=0.5))
        np.testing.assert_allclose(found.rows[setting], store.features, atol=2e-6)


def test_views_are_two_crops_of_each_image(photos: Path) -> None:
    encoder, source = encoder_of_spec(MODELS[0]), open_source(photos)
    settings = possible_settings(encoder)[:1]
    one, same, other = (
        setting_features(encoder, source, settings, views=True, seed=seed).rows[settings[0]] for seed in (0, 0, 1)
    )
    assert one.shape == (24, encoder.token_dimension)
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other) and not np.array_equal(one[:12], one[12:])


def test_sizes_suit_the_patches() -> None:
    encoder = encoder_of_spec(MODELS[1])
    assert all(setting.size % encoder.model.multiple == 0 for setting in possible_settings(encoder))
