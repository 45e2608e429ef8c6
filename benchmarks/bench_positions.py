"""Features of a ViT whose position embeddings are resized, against DINO's own network: the largest difference.

    python benchmarks/bench_positions.py --dino CHECKOUT [--quick] [--json FILE] [--record]

DINO's ViT-S/16 with random weights and position embeddings of the magnitude of its patches, saved and read as
`dino:FILE`, at the sizes of global views (224), of its retrieval evaluation (512, also not square) and of local views
(96). The difference with timm's rule is reported next to it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from evaluators import load_dino
from report import Row, finish, meets

from sop_faiss import load_encoder

SIZES = ((224, 224), (96, 96), (512, 512), (512, 352))
IMAGES, SAME = 2, "<= 1e-5"


def loud_vit(module: Any) -> Any:
    """Make DINO's ViT-S/16 from a seed, with large position embeddings."""
    torch.manual_seed(0)
    network = module.vits.vit_small(patch_size=16).eval()
    with torch.no_grad():
        network.pos_embed.normal_()
        network.cls_token.normal_()
    return network


@click.command()
@click.option("--dino", type=click.Path(path_type=Path, file_okay=False), help="A checkout of DINO.")
@click.option("--quick", is_flag=True, help="Two sizes, those of the views.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
def main(dino: Path | None, quick: bool, json_file: Path | None, record: bool) -> None:
    """Compare our features of DINO's weights with its own."""
    sizes = SIZES[:2] if quick else SIZES
    whats = {size: f"largest difference of [CLS], ViT-S/16, {size[0]} x {size[1]} pixels" for size in sizes}
    against = "DINO's network"
    if dino is None:
        why = {"not measured": "no --dino checkout"}
        rows = [Row(what, against, None, SAME, None, why) for what in whats.values()]
        finish("positions", rows, json_file=json_file, record=record)
        return
    network = loud_vit(load_dino(dino))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dino.pth"
        torch.save(network.state_dict(), file)
        ours, timms = (
            load_encoder(f"dino:{file}", arch="vit_small_patch16_224", position_resize=rule) for rule in (None, "timm")
        )
    rows = []
    for size, what in whats.items():
        images = torch.randn(IMAGES, 3, *size)
        with torch.no_grad():
            theirs = network(images)
            away, by_timm = (float((encoder(images) - theirs).abs().max()) for encoder in (ours, timms))
        rows.append(Row(what, against, away, SAME, meets(away, SAME), {"by_timms_rule": by_timm, "images": IMAGES}))
    finish("positions", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
