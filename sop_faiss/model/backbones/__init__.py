"""Backbones: images in, a [CLS] token and patch tokens out."""
