"""The model card (README.md) of an export: what it is, how to load it, how it was trained, its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sop_faiss.config import Config, TermConfig
from sop_faiss.model.backbones.small import SMALL_SIZES
from sop_faiss.model.encoders.spec import PACKAGED_ENCODERS

_METHODS = {
    "sop": "*Self-Organizing Visual Prototypes* (ICML 2025, arXiv 2505.21533)",
    "massl": "the method *MaSSL* (ICML 2024, arXiv 2407.17486)",
    "dino": "the method *DINO* (ICCV 2021, arXiv 2104.14294)",
    "ibot": "the method *iBOT* (ICLR 2022, arXiv 2111.07832)",
    "distill": "*distillation* of a frozen encoder by self-organizing prototypes of its features (arXiv 2505.21533)",
}
"""By `objective.kind`."""
_PLACE = ("step", "epoch", "images")
"""Keys of a line of metrics that are not scores."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a card besides the configuration."""

    folder: str
    """Name of the export's folder."""
    role: str
    """`teacher` or `student`."""
    checkpoint: str
    step: int
    fingerprint: str
    feature_dim: int
    pooling: str
    parameters: int
    version: str
    """Of this package."""
    files: tuple[str, ...] = ()
    """Optional ones: `model.onnx`, `model.pt2`."""
    caveat: str = ""
    """How timm's network differs from the run's, one clause; empty if it does not."""


def write_card(
    facts: ModelFacts, config: Config, preprocess: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> str:
    """Write the card as Markdown, with the heading that model hubs read. It has no paths of this machine.

    Args:
        facts: of the export.
        metrics: the lines of `metrics.jsonl`; those without a loss are scores.
    """
    parts = [
        "---\nlibrary_name: timm\npipeline_tag: image-feature-extraction\ntags: [sop_faiss, self-supervised]\n---",
        f"# {facts.folder}",
        f"An image encoder ({config.model.backbone}, {facts.parameters:,} parameters, features of dimension "
        f"{facts.feature_dim}) pretrained without labels by sop_faiss {facts.version}: "
        f"{_METHODS[config.objective.kind]}. It computes features, not classes.",
        _how_to_load(facts, config, preprocess),
        _training(facts, config),
        _scores(metrics, facts.step, config),
        "## What is left out\n\nThe mask token and the projector of the training: no feature depends on them. Training "
        "continues from the run, not from this export." + (f"\n\nNote that {facts.caveat}." if facts.caveat else ""),
        f"Fingerprint of the encoder: `{facts.fingerprint}`. It equals the run's: an index that was built with one can "
        "be searched with the other.",
    ]
    return "\n\n".join(parts) + "\n"


def adapter_card(folder: str, belongs_to: str, config: Config, fingerprint: str) -> str:
    """Write what an adapter is and how it is opened as Markdown, without paths of this machine."""
    lora, named = config.model.lora, "" if belongs_to in PACKAGED_ENCODERS else " --weights FILE"
    parts = [
        f"# {folder}",
        f"Low-rank additions (LoRA: rank {lora.rank}, alpha {lora.alpha:g}, layers: {lora.layers}) to the encoder "
        f"`{belongs_to}` ({config.model.backbone}), learned without labels by "
        f"{_METHODS[config.objective.kind]}, at {config.views.global_size} px.",
        f"    sop-index build --model {folder}{named} --data photos/ --out photos.index",
        f"`{belongs_to}` is installed by `pip install 'sop-faiss[encoder]'`."
        if not named
        else "FILE is what the training started from; other weights are refused.",
        f"Fingerprint of the encoder, the additions merged: `{fingerprint}`, which is the run's and that of its "
        "complete export.",
    ]
    return "\n\n".join(parts) + "\n"


def _registers(backbone: str) -> list[str]:
    """Return the line of code by which timm learns of a network that is not its own."""
    return [f"import sop_faiss.model.backbones  # has {backbone}"] if backbone in SMALL_SIZES else []


def _how_to_load(facts: ModelFacts, config: Config, preprocess: Mapping[str, Any]) -> str:
    side = preprocess["crop"]
    lines = [
        "## How to load it\n",
        "```python",
        "import timm, torch",
        *_registers(config.model.backbone),
        "from PIL import Image",
        'image = Image.open("photo.jpg").convert("RGB")',
        f'model = timm.create_model("local-dir:{facts.folder}", pretrained=True).eval()  # or "hf-hub:USER/NAME"',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        "features = torch.nn.functional.normalize(model(transform(image).unsqueeze(0)), dim=1)",
        "```\n",
        "With Hugging Face transformers (`pip install transformers timm`):\n",
        "```python",
        "from transformers import AutoImageProcessor, AutoModel",
        f'model = AutoModel.from_pretrained("{facts.folder}").eval()',
        f'processor = AutoImageProcessor.from_pretrained("{facts.folder}")',
        'features = model(**processor(image, return_tensors="pt")).pooler_output',
        "```\n",
        f"With sop_faiss: `sop-index build --model {facts.folder} --data photos/ --out photos.index`.\n",
        f"Images are resized to {preprocess['resize']} pixels (shorter side, bicubic), cropped to {side} x {side} "
        f"and normalized by mean {_numbers(preprocess['mean'])} and std {_numbers(preprocess['std'])}. The feature is "
        f"{_POOLINGS.get(facts.pooling, facts.pooling)}; compare features by cosine.",
    ]
    graphs = {"model.onnx": "ONNX", "model.pt2": "torch.export"}
    found = [f"`{name}` ({graphs[name]})" for name in facts.files if name in graphs]
    if found:
        lines.append(f"\nThe same network as a graph, for any number of {side} x {side} images: {', '.join(found)}.")
    return "\n".join(lines)


_POOLINGS = {"cls": "the [CLS] token after the final norm", "mean": "the mean of the final patch tokens or positions"}


def _training(facts: ModelFacts, config: Config) -> str:
    views, train = config.views, config.train
    length = f"{train.minutes:g} minutes" if train.minutes else f"{train.epochs:g} epochs"
    earlier = [f"{each.views.global_size} and {each.views.local_size}" for each in config.each_phase()[:-1]]
    first = f", first {', then '.join(earlier)}" if earlier else ""
    rows = {
        "network": f"{facts.role} of {facts.checkpoint}",
        "steps made": f"{facts.step:,} of {train.batch_size} images each",
        "schedule": f"{length}, base learning rate {config.optim.base_lr:g}",
        "views": f"{views.global_count} x {views.global_size} and {views.local_count} x {views.local_size} px{first}",
        **_terms(config),
    }
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _terms(config: Config) -> dict[str, str]:
    """Return a line about each loss term."""
    match config.objective.kind:
        case "massl":
            massl = config.massl
            blocks = f"memory of at most {massl.capacity:,} rows, compared in blocks of {massl.block_size:,}"
            return {"[CLS] loss": blocks}
        case "dino":
            return {"[CLS] loss": f"{config.dino.prototypes:,} learned prototypes"}
        case "ibot":
            terms = {"[CLS] loss": config.ibot.cls, "patch loss": config.ibot.patch}
            return {name: f"weight {t.weight:g}, {t.prototypes:,} learned prototypes" for name, t in terms.items()}
        case "distill":
            return {
                "[CLS] loss": _term(config.sop.cls),
                "direction loss": f"weight {config.distill.direction_weight:g}",
            }
    return {"[CLS] loss": _term(config.sop.cls), "patch loss": _term(config.sop.patch)}


def _term(term: TermConfig) -> str:
    counts = ((term.num_anchors, "anchor"), (term.num_supports, "support"), (term.tasks, "task"))
    anchors, supports, tasks = (f"{count:,} {what}{'s' if count != 1 else ''}" for count, what in counts)
    return f"weight {term.weight:g}, memory of at most {term.capacity:,} rows, {anchors} with {supports} each, {tasks}"


def _scores(metrics: Sequence[Mapping[str, Any]], step: int, config: Config) -> str:
    """Tabulate the scores that the run measured while it trained, up to the exported step."""
    scored = [line for line in metrics if "loss" not in line and line["step"] <= step]
    lines = [
        f"| {line['step']:,} | {name} | {value:.4g} |"
        for line in scored
        for name, value in line.items()
        if name not in _PLACE and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if not lines:
        return "## Scores\n\nThe run measured none (`evaluate.every_steps`)."
    return (
        "## Scores\n\nMeasured by the run while it trained, on the sets of its `evaluate` section, in percent; "
        f"`view_recall_at_1` on views of its training images, unless it held some out.{_scored_feature(config)}\n\n"
        "| step | score | |\n|---|---|---|\n" + "\n".join(lines)
    )


def _scored_feature(config: Config) -> str:
    """Return a sentence about the feature that was scored, if it is not that of the export."""
    settings = config.evaluate
    options = [f"--pooling {settings.pooling}"] if settings.pooling else []
    options += ["--mirrored"] if settings.mirrored else []
    return f" They are of the feature that sop_faiss makes with `{' '.join(options)}`." if options else ""


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
