"""Configuration: layers, checks, suggestions, and the packaged files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sop_faiss.config import Config, config_summary, load_config, packaged_configs, to_yaml
from sop_faiss.config.checks import shown
from sop_faiss.errors import ConfigError
from tests.runs import tiny_config_file


def test_overrides_come_last_and_the_result_can_be_read_again(tmp_path):
    path = tiny_config_file(tmp_path)
    config = load_config(path, ["train.batch_size=7", "views.global_scale=[0.3,0.9]", "sop.cls.tasks=5"])
    assert (config.train.batch_size, config.views.global_scale, config.sop.cls.tasks) == (7, (0.3, 0.9), 5)
    assert config.sop.cls.num_anchors == 8
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.kind=adam",),
        ("optim.lr_scaling=root",),
        ("optim.patch_embed_lr_scale=0",),
        ("optim.patch_embed_lr_scale=1.5",),
        ("optim.muon_lr_scale=2",),
        ("optim.muon_momentum=0.9",),
        ("optim.muon_lr_scale=0", "optim.kind=muon"),
        ("optim.muon_momentum=1", "optim.kind=muon"),
        ("optim.muon_lr_scale=many", "optim.kind=muon"),
        ("model.layer_scale=0",),
        ("model.layer_scale=-1",),
        ("model.registers=-1",),
        ("model.registers=100000",),
        ("model.registers=1.5",),
    ],
)
def test_settings_of_a_modern_recipe_are_checked(tmp_path, overrides):
    with pytest.raises(ConfigError, match=re.escape(overrides[0].partition("=")[0])) as caught:
        load_config(tiny_config_file(tmp_path), overrides)
    assert "\n" not in str(caught.value)


DINO = ("objective.kind=dino", "masks.kind=none")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ((*DINO, "sop.cls.tasks=5"), "sop.cls.tasks"),
        ((*DINO, "neighbors.refresh=full"), "neighbors.refresh"),
        ((*DINO, "dino.prototypes=1"), "dino.prototypes"),
        ((*DINO, "dino.center_momentum=2"), "dino.center_momentum"),
        ((*DINO, "dino.freeze_last_layer_epochs=-1"), "dino.freeze_last_layer_epochs"),
        (("objective.kind=massl", "masks.kind=none", "massl.block_size=131073"), "massl.block_size"),
        (("objective.kind=massl", "masks.kind=none", "massl.koleo_weight=-1"), "massl.koleo_weight"),
        (("objective.kind=massl", "masks.kind=random"), "masks.kind"),
        (("objective.kind=ibot", "ibot.cls.prototypes=7"), "ibot.shared_head"),
        (("objective.kind=ibot", "ibot.cls.weight=0", "ibot.patch.weight=0"), "ibot.cls.weight"),
        (("objective.kind=ibot", "masks.kind=none"), "ibot.patch.weight"),
        (("objective.kind=ibot", "masks.kind=none", "masks.drop=0.5"), "ibot.patch.weight"),
        (("objective.kind=ibot", "ibot.cls.weight=0", "masks.start_epoch=1"), "ibot.cls.weight"),
    ],
)
def test_settings_of_the_rivals_are_checked(tmp_path, overrides, field):
    with pytest.raises(ConfigError, match=re.escape(field)) as caught:
        load_config(tiny_config_file(tmp_path), overrides)
    assert "\n" not in str(caught.value)


def test_another_objective_drops_the_settings_of_the_file(tmp_path):
    config = load_config(tiny_config_file(tmp_path), [*DINO, "dino.prototypes=9"])
    assert config.sop == Config().sop and config.dino.prototypes == 9
    assert config.term_weights() == {"cls": 1, "patch": 0}
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config
    back = load_config(again, ["objective.kind=sop", "masks.kind=block"])
    assert back.dino == Config().dino
    # the same objective drops nothing, and in one file both are refused
    assert load_config(tiny_config_file(tmp_path), ["objective.kind=sop"]).sop.cls.capacity == 40
    both = tmp_path / "both.yaml"
    both.write_text("objective: {kind: dino}\nmasks: {kind: none}\nsop: {eps: 0.2}\n")
    with pytest.raises(ConfigError, match=r"sop\.eps"):
        load_config(both)


def test_defaults_are_the_papers():
    config = Config()
    assert (config.sop.cls.capacity, config.sop.patch.capacity) == (65536, 8192)
    assert (config.sop.cls.num_anchors, config.sop.cls.num_supports, config.sop.cls.tasks) == (4096, 8, 4)
    assert (config.sop.patch.num_anchors, config.sop.patch.num_supports, config.sop.patch.tasks) == (512, 0, 1)
    assert (config.loss.student_temp, config.loss.teacher_temp_start, config.loss.teacher_temp) == (0.1, 0.04, 0.07)
    assert config.views.count == 12


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_packaged_configurations_load(name):
    load_config(name)
    opening = packaged_configs()[name].read_text().split("\n\n")[0]
    for word in ("Paper:", "Device:", "Time:", "Command:", "Expected:"):
        assert f"# {word}" in opening, f"{name} does not say {word}"


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_readme_has_the_sections_that_configurations_name(name):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    headings = {line.lstrip("# ") for line in readme.splitlines() if line.startswith("#")}
    opening = packaged_configs()[name].read_text().split("\n\n")[0]
    assert set(re.findall(r'README, "([^"]+)"', opening)) <= headings


def test_summaries_are_the_first_sentence_of_the_opening_comment(tmp_path):
    path = tmp_path / "mine.yaml"
    for content, wanted in (
        ("# A ViT-B/16 of 0.1 epochs: tiny. More of it.\n# Paper: none\n", "A ViT-B/16 of 0.1 epochs: tiny"),
        ("# One sentence.\n", "One sentence"),
        ("train: {epochs: 1} # no. comment\n", ""),
        ("", ""),
    ):
        path.write_text(content)
        assert config_summary(path) == wanted
    assert all(8 < len(config_summary(path)) < 110 for path in packaged_configs().values())


FOREIGN = (
    "subclass", "Merge error", "Incompatible", "not Optional", "Integer", "Float", "Config'", "ListConfig",
    "DictConfig", "TrainConfig", "instance", "<unicode string>", "full_key", "object_type", "codec", "sys.",
    "Interpolation", "primitive", "loaded object", "Value '",
)  # fmt: skip


def assert_words_are_ours(message: str) -> None:
    assert "\n" not in message and not [word for word in FOREIGN if word in message]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=3", "did you mean train.batch_size"),
        ("num_anchors=3", "did you mean sop.cls.num_anchors"),
        ("train.batch_size=many", "train.batch_size = many: wanted a whole number"),
        ("train.epochs=null", "train.epochs = null: wanted a number"),
        ("views=3", "overrides: views = 3: wanted settings by name, as views.global_count"),
        ("views.global_scale=3", "views.global_scale = 3: wanted 2 numbers"),
        ("train=5", "overrides: train = 5: wanted settings by name, as train.epochs"),
        ("train=null", "overrides: train = null: wanted settings by name, as train.epochs"),
        ("sop={cls: 5}", "overrides: sop.cls = 5: wanted settings by name, as sop.cls.weight"),
        ("model.patch_size=x", "model.patch_size = x: wanted a whole number, or null"),
        ("model.backbone=[a]", "model.backbone = ['a']: wanted text"),
        ("train.background_save=perhaps", "train.background_save = perhaps: wanted true or false"),
        ("views.mean=[[1],2,3]", "views.mean = [[1], 2, 3]: wanted 3 numbers"),
        ("views.mean=[{a: 1},2,3]", "views.mean = [{'a': 1}, 2, 3]: wanted 3 numbers"),
        ("views.mean=['${train.device}',2,3]", "views.mean: wanted 3 numbers"),
        ("train.epochs=${data.train}x", "train.epochs: wanted a number"),
        ("train.epochs=${nope}", "train.epochs: ${...} wants the name of another field"),
        ("train.epochs=${train.epochs}", "train.epochs: ${...} wants the name of another field"),
        ("train.epochs=${", "override 'train.epochs=${': "),
        ("train.epochs=[", "override 'train.epochs=['"),
        (f"train.seed={'9' * 5000}", "override 'train.seed=999"),
        ("data.train=\ud800", "override 'data.train="),
        ("views.global_scale=[0.9,0.1]", "smaller <= larger"),
        ("sop.cls.num_anchors=41", "exceeds sop.cls.capacity = 40"),
        ("sop.cls.num_supports=40", "wanted fewer than sop.cls.capacity"),
        ("sop.patch.num_anchors=25", "exceeds sop.patch.capacity"),
        ("sop.eps=0.9", "wanted 0 <= eps"),
        ("sop.eps=nan", "wanted finite numbers"),
        ("sop.contributions=smoth", "did you mean 'smooth'"),
        ("loss.student_temp=0", "wanted 0.005 or more"),
        ("train.precision=fp16", "wanted one of auto, float32, bf16"),
        ("masks.kind=none", "leaves the patch loss without patches"),
        ("masks.drop=0.5", "masks.drop = 0.5 with masks.kind = block"),
        ("masks.drop=1", "masks.drop = 1.0: wanted 0 or more, less than 1"),
        ("masks={kind: none, drop: 0.5}", "set sop.patch.weight=0"),
        ("objective.kind=dno", "did you mean 'dino'"),
        ("objective.kind=dino", "masks.kind = block with objective.kind = dino"),
        ("dino.prototypes=7", "dino.prototypes = 7 is a setting of objective.kind = dino, and this run's is sop"),
        ("massl={fill: teacher}", "massl.fill = teacher is a setting of objective.kind = massl"),
        ("ibot.patch.weight=0.5", "ibot.patch.weight = 0.5 is a setting of objective.kind = ibot"),
        ("objective={kind: massl, name: x}", "unknown configuration key objective.name"),
        ("evaluate.test=holdout", "needs data.holdout_share"),
        ("evaluate.test=x", "both or neither"),
        ("justakey", "wanted key=value"),
        ("=3", "wanted key=value"),
        ("model.num_heads=5", "not divisible"),
        ("train.epochs=inf", "wanted finite numbers"),
        ("train.batch_size=???", "train.batch_size"),
        ("data.train=${HOME}/x", "data.train"),
        ("views.mean=[128,128,128]", "not 0 to 255"),
        ("masks.ratio=[0,0]", "hides no patch"),
        ("masks={kind: random, random_ratio: null, probability: 0}", "hides no patch"),
        ("masks.start_epoch=6", "masks.start_epoch = 6: wanted fewer than train.epochs = 6.0"),
        ("masks.start_epoch=-1", "masks.start_epoch = -1: wanted 0 to 1,000,000"),
        ("model.cls_token_std=0", "model.cls_token_std = 0.0: wanted more than 0, at most 1"),
        ("optim.warmup_epochs=100", "exceeds train.epochs"),
        ("evaluate={every_steps: 5, view_recall: never}", "with nothing to score"),
        ("evaluate.best_by=map", "nothing is scored"),
        ("evaluate.view_images=1", "evaluate.view_images = 1: wanted 2 or more"),
        ("evaluate.background=yes", "wanted one of auto, always, never"),
        ("evaluate.retrieval_protocol=plan", "did you mean 'plain'"),
        ("evaluate.retrieval_root=x", "without evaluate.retrieval"),
        ("optim.projector_warmup_epochs=5", "leave nothing of train.epochs = 6.0: lower the warm-ups"),
        ("optim.projector_warmup_epochs=-1", "wanted 0 or more"),
        ("optim.layer_decay=0", "optim.layer_decay = 0.0: wanted more than 0, at most 1"),
        ("optim.layer_decay=1.1", "wanted more than 0, at most 1"),
        ("model.batchnorm=live", "model.batchnorm = 'live': wanted one of auto, frozen, batch"),
        ("evaluate.max_train_images=-5", "wanted 0 or more"),
        ("views.mean=[1,2]", "overrides: views.mean = [1, 2]: wanted 3 numbers"),
        ("views.mean=[1,2,x]", "overrides: views.mean = [1, 2, 'x']: wanted 3 numbers"),
        ("masks.ratio=[0.1,0.2,0.3]", "overrides: masks.ratio = [0.1, 0.2, 0.3]: wanted 2 numbers"),
        ("sop.cls=[1]", "overrides: sop.cls = [1]: "),
        ("model.embed_dim=100000000", "model.embed_dim = 100000000: wanted 1 to 16,384"),
        ("model.depth=100000", "wanted 1 to 512"),
        ("model.projector_hidden=1", "wanted 2 to 65,536"),
        ("model.projector_layers=1000", "wanted 1 to 64"),
        ("sop.cls.tasks=1000000", "wanted 1 to 1,000"),
        ("views.local_count=100000", "wanted 0 to 1,000"),
        ("data.workers=100000", "wanted 0 to 1,024"),
        ("evaluate.batch_size=1000000000", "wanted 1 to 65,536"),
        ("train.epochs=1e300", "train.epochs = 1e+300: wanted more than 0, and at most 1,000,000"),
        ("loss.teacher_temp_epochs=1e300", "wanted 0 to 1,000,000"),
        (f"neighbors.probes={10**30}", "neighbors.probes is an integer of more than 64 bits"),
        (f"sop.cls.num_supports={10**30}", "sop.cls.num_supports is an integer of more than 64 bits"),
        (f"{'x' * 100}=3", f"unknown configuration key {'x' * 60}..."),
        (f"train.device={'x' * 100}: [", "override 'train.device=xxxx"),
    ],
)
def test_wrong_values_are_one_line(tmp_path, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(tiny_config_file(tmp_path), [override])
    assert message in str(caught.value)
    assert_words_are_ours(str(caught.value))


def ablations() -> list[tuple[str, ...]]:
    """The overrides of each row of docs/ablations.md; x and N stand for the numbers of the row's second column."""
    text = (Path(__file__).parent.parent / "docs" / "ablations.md").read_text().partition("## Where paper")[0]
    found: list[tuple[str, ...]] = []
    for line in text.splitlines():
        cells = line.split("|")
        for written in re.findall(r"`(\S+=[^`]*)`", cells[3]) if len(cells) == 6 else ():
            values = re.findall(r"\d+", cells[2]) if written.endswith(("=x", "=x-1", "=N")) else [""]
            filled = (re.sub(r"=(x-1|x|N)$", lambda m, v=v: f"={int(v) - (m[1] == 'x-1')}", written) for v in values)
            found += [tuple(overrides.split()) for overrides in filled]
    return found


@pytest.mark.parametrize("overrides", ablations(), ids=" ".join)
def test_the_ablations_are_settings(overrides):
    load_config("ablation_vits16_300ep", overrides)


def test_the_ablations_are_those_of_the_paper():
    found = {" ".join(overrides) for overrides in ablations()}
    off = "sop.patch.weight=0 masks.kind=none"
    assert {"sop.cls.num_anchors=16384", "sop.cls.num_supports=1", f"sop.cls.tasks=1 {off}", off} <= found
    assert {f"sop.cls.tasks=4 {off}", "sop.patch.tasks=2", "sop.cls.tasks=4 sop.patch.tasks=2"} <= found
    assert {f"sop.cls.capacity={rows}" for rows in (8192, 16384, 32768, 65536, 98304)} <= found
    assert {f"sop.patch.capacity={rows}" for rows in (1024, 2048, 4096, 8192)} <= found
    assert not {"sop.cls.num_supports=0", "sop.cls.capacity=131072"} & found


def test_masks_that_start_late_need_another_loss_until_then(tmp_path):
    assert load_config("swint14").masks.start_epoch == 50
    late = ("masks.start_epoch=3", "sop.cls.weight=0")
    with pytest.raises(ConfigError, match=r"masks\.start_epoch = 3 with sop\.cls\.weight = 0"):
        load_config(tiny_config_file(tmp_path), late)
    load_config(tiny_config_file(tmp_path), ["masks.start_epoch=9", "sop.patch.weight=0"])  # for no loss


def test_both_losses_off_teach_nothing(tmp_path):
    with pytest.raises(ConfigError, match="nothing would be learned"):
        load_config(tiny_config_file(tmp_path), ["sop.cls.weight=0", "sop.patch.weight=0"])


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}", "x/${oc.env:SECRET}/y", "${oc.env:NOT_THERE,SECRET}",
        "${${train.device}:SECRET}", "${train.device}${oc.env:SECRET}", "${oc.decode:'1'}",
    ],
)  # fmt: skip
def test_a_configuration_reads_nothing_from_outside(tmp_path, monkeypatch, value):
    monkeypatch.setenv("SECRET", "hunter2")
    path = tiny_config_file(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.train = .*: only \$\{section\.field\} is filled in"):
        load_config(path, [f"data.train={value}"])
    path.write_text(path.read_text().replace("data: {workers: 0}", f'data: {{workers: 0, train: "{value}"}}'))
    with pytest.raises(ConfigError, match=r"data\.train = .*: only \$\{section\.field\} is filled in"):
        load_config(path)


def test_a_field_may_take_the_value_of_another(tmp_path):
    path = tiny_config_file(tmp_path)
    assert load_config(path, ["train.seed=${train.batch_size}"]).train.seed == 6
    path.write_text(path.read_text().replace("local_size: 8", 'local_size: "${views.global_size}"'))
    assert load_config(path).views.local_size == 16


def test_what_is_shown_of_a_users_words():
    assert shown("two\nlines \x1b[31m") == "two lines ?[31m"
    assert shown("x" * 60) == "x" * 60
    assert shown("x" * 61) == "x" * 60 + "..."


@pytest.mark.parametrize(
    "content",
    [
        b"a: [", b"- 1\n- 2\n", b"\xff\xfe\x00", b"views: {global_size: '${oc.env:HOME}'}", b"train: \xff", b"5",
        b"train: 5", b"train:", b"train: [1]", b"sop: {cls: 5}", b"null: 1", b"5: 1", b"[1, 2]: 3", b"train: !!set {a}",
        b"train: {epochs: !!binary aGVsbG8=}", b"train: ${data}", b"a: 1\n---\nb: 2", b"\ttrain: 5", b"a\0b",
        b"train: !!python/object/apply:os.system ['true']", b"a: &x [*x]", b"train.epochs: 3", b"'': 1", b"[" * 3000,
        b"views: {mean: [{a: 1}, 2, 3]}", b"train: {seed: " + b"9" * 5000 + b"}", b"train: {epochs: 2001-01-01}",
    ],
)  # fmt: skip
def test_files_that_are_no_configuration(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert_words_are_ours(str(caught.value))


def test_a_folder_is_no_configuration_but_a_runs_may_lie_in_it(tmp_path):
    for named in ("", f"{tmp_path / 'config.yaml'}"):
        with pytest.raises(ConfigError, match=r"folder.*" + re.escape(named)) as caught:
            load_config(tmp_path)
        assert "does not exist" not in str(caught.value)
        (tmp_path / "config.yaml").write_text("")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "a\ud800", "tiny.yaml/x"])
def test_names_that_no_file_has(tmp_path, monkeypatch, name):
    tiny_config_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="wanted a file, or a packaged one"):
        load_config(name)


def test_a_missing_configuration_suggests_a_packaged_one():
    with pytest.raises(ConfigError, match="did you mean digits_demo"):
        load_config("digit_demo")
