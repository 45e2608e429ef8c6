"""What a setting means, and the page of all settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sop_faiss.cli.train import main
from sop_faiss.config import Config, flat_settings, packaged_configs
from sop_faiss.config.explain import _meanings, explain
from sop_faiss.config.unknown_keys import known_keys
from sop_faiss.errors import ConfigError
from tests.messages import command_fails

PAGE = Path(__file__).parent.parent / "docs" / "config.md"


def test_the_page_is_what_the_command_prints():
    """If this fails: sop-train --explain all > docs/config.md."""
    result = CliRunner().invoke(main, ["--explain", "all"])
    assert result.exit_code == 0 and result.stdout == PAGE.read_text()


def test_every_setting_has_a_meaning_and_is_on_the_page():
    assert [name for name, text in _meanings().items() if not text] == []
    page = PAGE.read_text()
    for name in flat_settings(Config()):
        assert f"- `{name}` = " in page
    assert all(f"{name}: " in page for name in packaged_configs())


def named(text: str) -> list[str]:
    return [line.split("`")[1] for line in text.splitlines() if line.startswith("- `")]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("sop.cls.num_anchors", ["sop.cls.num_anchors"]),
        ("K", ["sop.cls.num_anchors", "sop.patch.num_anchors"]),
        ("memory.fill", ["sop.fill"]),
        ("momentum", ["optim.momentum"]),
        ("tensorboard", ["train.wandb_project"]),
        ("sop.patch", [name for name in known_keys() if name.startswith("sop.patch.")]),
    ],
)
def test_settings_by_name_symbol_old_name_section_and_word(what, names):
    assert sorted(named(explain(what))) == sorted(names)


def test_kind_default_accepted_values_configurations_and_old_names():
    first = explain("data.access").splitlines()[0]
    assert first.startswith("- `data.access` = auto (text: one of auto, cached, sequential). How shards are read.")
    text = explain("sop.cls.weight")
    assert "= 1 (a number: 0 or more)" in text and "loss.cls_weight" in text
    assert "photos_demo: 96" in explain("views.global_size") and "8 to 4096" in explain("views.global_size")
    assert "a whole number, or null: 1 to 512" in explain("model.depth")
    assert "(true or false)" in explain("masks.pixels")


@pytest.mark.parametrize("what", ["", "xyzzy", "a\n\tb", "x" * 100_000, "train.epochs=3"])
def test_nothing_is_called_so(what):
    with pytest.raises(ConfigError) as caught:
        explain(what)
    assert "explain" in caught.value.arguments
    assert "--explain" in command_fails(main, "--explain", what)


def test_the_command_explains_without_a_configuration_and_alone():
    assert named(CliRunner().invoke(main, ["--explain", "k"]).stdout)[0] == "sop.cls.num_supports"
    assert "--explain" in command_fails(main, "photos_demo", "--explain", "K")
    missing = CliRunner().invoke(main, ["--dry-run"])
    assert missing.exit_code == 2 and "CONFIG" in missing.stderr
