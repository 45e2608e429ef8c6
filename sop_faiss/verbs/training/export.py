"""Export of a run's backbone as a directory that timm and Hugging Face load, as `sop-export` does."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import atomic_directory, sha256_file, write_json
from sop_faiss.model.adapter import TENSORS_FILE, base_name, write_adapter
from sop_faiss.model.checkpoint import read_low_rank, read_state, refuse_missing_best, run_directory
from sop_faiss.model.encoders.encoder import Encoder, encoder_of_backbone
from sop_faiss.model.encoders.sop_encoder import SopModel, trained_model
from sop_faiss.model.export import CONFIG_FILE, WEIGHTS_FILE, is_export, timm_config
from sop_faiss.model.graphs import read_torch_export, require_onnx, write_onnx, write_torch_export
from sop_faiss.model.tensor_files import writing_tensors
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.paths import path_state, real_path
from sop_faiss.report.model_card import ModelFacts, adapter_card, write_card
from sop_faiss.train.log.monitor import read_metrics

LEAST_COSINE = 0.9999
"""Least cosine between a feature of the run and that of the export as timm loads it; with less the export fails."""


@dataclass(frozen=True)
class ExportOptions:
    """What to export."""

    student: bool = False
    """Export the student instead of the teacher."""
    onnx: bool = False
    """Also write model.onnx."""
    torch_export: bool = False
    """Also write model.pt2."""
    adapter: bool = False
    """Write what a run with `model.lora` has learned, alone, instead of the complete network."""


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    name: str
    """What was exported, as in `teacher of step_00001000`."""
    architecture: str
    fingerprint: str
    """Of the encoder; an adapter's is that of the weights with the additions merged."""
    feature_dim: int
    parameters: int
    """Of an adapter: those that were added."""
    files: tuple[str, ...]
    size_bytes: int
    """Of the tensors' file."""
    belongs_to: str = ""
    """Of an adapter: the name of the weights that it was added to; empty for a complete network."""
    cosine: float = 1.0
    """The least cosine between features of the run and of timm's network, which an adapter does not have."""
    caveat: str = ""
    """How timm's network differs from the run's; empty if it does not."""


def export_run(run: Path, out: Path, options: ExportOptions | None = None) -> ExportResult:
    """Write a run's backbone for timm and Hugging Face: tensors, config.json, and a card that says how to load it.

    With `adapter`, only what `model.lora` added to `model.init`, for this package (`model/adapter.py`).

    Args:
        run: a run directory, a checkpoint in it, or its best/.
        out: a new or empty directory; it is written completely, or not at all.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or timm does not rebuild the network.
        ConfigError: a package for an option is missing, or the run was trained without `model.lora`.
        SopError: `out` is not empty.
    """
    options = options or ExportOptions()
    refuse_occupied(out)
    if options.adapter and (options.onnx or options.torch_export):
        graph = "onnx" if options.onnx else "torch_export"
        raise ConfigError(f"`{graph}` is of a complete network, which `adapter` does not write: leave one out")
    if options.onnx:
        require_onnx()
    if is_export(run):
        raise CheckpointError(f"{run} is already an export: name the run from which it was made")
    refuse_missing_best(run)
    if not run.is_dir():
        raise CheckpointError(f"run {run} {path_state(run)}: wanted a run directory")
    model, checkpoint = trained_model(run, student=options.student)
    role = "student" if options.student else "teacher"
    encoder = encoder_of_backbone(model.backbone, model.config, f"{role} of {checkpoint.name}").eval()
    if options.adapter:
        return _export_adapter(run, out, checkpoint, encoder, model, options.student)
    return _export_network(out, checkpoint, encoder, model, options)


def _export_network(
    out: Path, checkpoint: Path, encoder: Encoder, model: SopModel, options: ExportOptions
) -> ExportResult:
    """Write the complete network, after timm has rebuilt it."""
    with atomic_directory(out) as directory, torch.no_grad():
        _write_backbone(directory, model, encoder)
        images = _example(encoder)
        features = encoder(images)
        network = _rebuilt(directory, model)
        cosine = _least_cosine(features, network(images), "the network that timm rebuilds")
        graphs = _write_graphs(directory, network, images, features, options)
        parameters = sum(value.numel() for value in network.parameters())
        facts = ModelFacts(
            folder=real_path(out).name,
            role="student" if options.student else "teacher",
            checkpoint=checkpoint.name,
            step=int(read_state(checkpoint, verify=False)["step"]),
            fingerprint=encoder.fingerprint,
            feature_dim=encoder.feature_dim,
            pooling=encoder.pooling,
            parameters=parameters,
            version=importlib.metadata.version("sop-faiss"),
            files=graphs,
            caveat=_caveat(model),
        )
        metrics = read_metrics(run_directory(checkpoint))
        card = write_card(facts, model.config, encoder.preprocess.to_dict(), metrics)
        (directory / "README.md").write_text(card, encoding="utf-8")
        result = _result(directory, WEIGHTS_FILE, encoder, model, parameters)
    return replace(result, cosine=cosine, caveat=facts.caveat)


def _export_adapter(
    run: Path, out: Path, checkpoint: Path, encoder: Encoder, model: SopModel, student: bool
) -> ExportResult:
    """Write an adapter's files; the encoder is the run's, with the additions merged."""
    base, added, _ = read_low_rank(checkpoint, student=student)
    if not added:
        raise ConfigError(
            f"{run} was trained without model.lora, so that all of its weights are its own: leave `adapter` out"
        )
    with atomic_directory(out) as directory:
        write_adapter(directory, model.config, base, added, model.architecture, encoder.pooling)
        belongs_to = base_name(model.config.model.init)
        card = adapter_card(real_path(out).name, belongs_to, model.config, encoder.fingerprint)
        (directory / "README.md").write_text(card, encoding="utf-8")
        parameters = sum(value.numel() for value in added.values())
        result = _result(directory, TENSORS_FILE, encoder, model, parameters)
    return replace(result, belongs_to=belongs_to)


def _result(directory: Path, weights: str, encoder: Encoder, model: SopModel, parameters: int) -> ExportResult:
    """Describe what was written; `weights` is the file whose size counts."""
    return ExportResult(
        name=encoder.name,
        architecture=model.config.model.backbone,
        fingerprint=encoder.fingerprint,
        feature_dim=encoder.feature_dim,
        parameters=parameters,
        files=tuple(sorted(file.name for file in directory.iterdir())),
        size_bytes=(directory / weights).stat().st_size,
    )


def _caveat(model: SopModel) -> str:
    if model.position_resize != "dino":
        return ""
    side = model.native_size
    return (
        f"timm's features are the same for images of {side} x {side} pixels only: for others timm resizes position "
        "embeddings by its own rule, the run and sop_faiss by DINO's"
    )


def _write_backbone(directory: Path, model: SopModel, encoder: Encoder) -> None:
    """Write model.safetensors and config.json."""
    network = model.backbone.trunk
    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    with writing_tensors(directory / WEIGHTS_FILE):
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    checksum = sha256_file(directory / WEIGHTS_FILE)
    content = timm_config(network, model.config, encoder.preprocess, checksum)
    write_json(directory / CONFIG_FILE, content)


def _example(encoder: Encoder) -> Float[Tensor, "b 3 s s"]:
    """Make a few normalized images of noise, always the same."""
    side = encoder.preprocess.crop
    return torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))


def _rebuilt(directory: Path, model: SopModel) -> Any:
    """Let timm build the network from the directory alone, without any code of this package."""
    try:
        with torch.random.fork_rng(devices=[]):
            return timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
    except (RuntimeError, TypeError, ValueError, AssertionError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"timm {timm.__version__} does not rebuild {model.config.model.backbone} from its export ({reason})"
        ) from None


def _write_graphs(
    directory: Path,
    network: Any,
    images: Float[Tensor, "b 3 s s"],
    features: Float[Tensor, "b d"],
    options: ExportOptions,
) -> tuple[str, ...]:
    """Write model.onnx and model.pt2 if requested; the latter is loaded again and compared."""
    files = []
    if options.onnx:
        write_onnx(network, images, directory / "model.onnx")
        files.append("model.onnx")
    if options.torch_export:
        write_torch_export(network, images, directory / "model.pt2")
        _least_cosine(features[:1], read_torch_export(directory / "model.pt2", images[:1]), "the written model.pt2")
        files.append("model.pt2")
    return tuple(files)


def _least_cosine(ours: Float[Tensor, "b d"], theirs: Float[Tensor, "b ..."], what: str) -> float:
    """Return the least cosine; raise CheckpointError unless all features agree."""
    if theirs.flatten(1).shape != ours.shape:
        raise CheckpointError(f"{what} gives features of shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
    cosine = float(torch.nn.functional.cosine_similarity(ours.double(), theirs.flatten(1).double(), dim=1).min())
    if not cosine > LEAST_COSINE:
        raise CheckpointError(f"{what} gives other features (cosine {cosine:.6f}): this backbone cannot be exported")
    return cosine
