"""Backbones: images in, a [CLS] token and patch tokens out."""

from sop_faiss.model.backbones import small as small  # registers its networks with timm, whichever module is wanted
