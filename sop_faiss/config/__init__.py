"""The configuration of a run: frozen dataclasses, their checks, YAML files and dotted overrides.

Every setting is a field here, with its meaning and the paper's value as default (docs/method.md, 5).
Durations are in epochs here and in steps everywhere else.
"""

from sop_faiss.config.config_files import config_summary, find_config, packaged_configs
from sop_faiss.config.data import DataConfig, MasksConfig, ViewsConfig
from sop_faiss.config.distill import DistillConfig
from sop_faiss.config.load import config_of, flat_settings, load_config, load_run_config, to_yaml
from sop_faiss.config.lora import LoraConfig
from sop_faiss.config.method import (
    LossConfig,
    ModelConfig,
    NeighborsConfig,
    RegularizerConfig,
    SopConfig,
    TermConfig,
)
from sop_faiss.config.rivals import DinoConfig, IbotConfig, MasslConfig, ObjectiveConfig, PrototypesConfig
from sop_faiss.config.run import EvaluateConfig, OptimConfig, TrainConfig
from sop_faiss.config.schema import Config

__all__ = [
    "Config",
    "DataConfig",
    "DinoConfig",
    "DistillConfig",
    "EvaluateConfig",
    "IbotConfig",
    "LoraConfig",
    "LossConfig",
    "MasksConfig",
    "MasslConfig",
    "ModelConfig",
    "NeighborsConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "PrototypesConfig",
    "RegularizerConfig",
    "SopConfig",
    "TermConfig",
    "TrainConfig",
    "ViewsConfig",
    "config_of",
    "config_summary",
    "find_config",
    "flat_settings",
    "load_config",
    "load_run_config",
    "packaged_configs",
    "to_yaml",
]
