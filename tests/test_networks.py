"""Student and teacher: equal at first, EMA afterwards, and only asked-for tokens projected."""

from __future__ import annotations

import pytest
import torch

from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.networks import Student, update_teacher
from sop_faiss.model.projector import Projector
from tests.runs import networks_of, tiny_config


def views(count: int, side: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_they_start_equal_and_the_teacher_takes_no_gradient(tmp_path):
    student, teacher = networks_of(tiny_config(tmp_path))
    for (name, ours), theirs in zip(teacher.named_parameters(), student.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert not ours.requires_grad
        assert ours.data_ptr() != theirs.data_ptr()
    baseline = seeded_backbone(tiny_config(tmp_path).model, 16, 0)
    assert all(torch.equal(a, b) for a, b in zip(baseline.parameters(), student.backbone.parameters(), strict=True))


def test_update_is_the_moving_average_written_out(tmp_path):
    student, teacher = networks_of(tiny_config(tmp_path))
    before = [p.clone() for p in teacher.parameters()]
    with torch.no_grad():
        for p in student.parameters():
            p.add_(torch.ones_like(p))
    update_teacher(teacher, student, 0.9)
    for old, new, source in zip(before, teacher.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * source, rtol=1e-5, atol=1e-6)
    update_teacher(teacher, student, 1.0)
    frozen = [p.clone() for p in teacher.parameters()]
    update_teacher(teacher, student, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(frozen, teacher.parameters(), strict=True))


def test_projector_makes_unit_rows_in_float32():
    projector = Projector(6, 10, 4)
    assert [type(m).__name__ for m in projector.mlp] == ["Linear", "GELU", "Linear", "GELU", "Linear"]
    rows = projector(torch.randn(3, 6))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert projector(torch.randn(3, 6)).dtype == torch.float32
    assert Projector(6, 10, 4, layers=1).mlp[0].weight.shape == (4, 6)
    assert projector(torch.empty(0, 6)).shape == (0, 4)


@pytest.mark.parametrize("token", ["cls", "mean"])
def test_embeddings_are_those_of_the_asked_tokens(tmp_path, token):
    _, network = networks_of(tiny_config(tmp_path, f"model.global_token={token}"))
    network.eval()
    wanted = torch.tensor([0, 17, 31])
    _, _, cls, patches = network(views(2), None, wanted)
    tokens = network.backbone(views(2))
    expected = tokens.cls if token == "cls" else tokens.patches.mean(1)
    torch.testing.assert_close(cls, network.heads["shared"](expected))
    torch.testing.assert_close(patches, network.heads["shared"](tokens.patches.flatten(0, 1)[wanted]))
    assert network(views(2), None, wanted, wants_cls=False).cls.shape[0] == 0
    assert network(views(2)).patches.shape[0] == 0


def test_the_student_sees_masked_global_and_local_views(tmp_path):
    student, _ = networks_of(tiny_config(tmp_path))
    student.eval()
    global_views, local_views = views(6).view(2, 3, 3, 16, 16), views(3, 8).view(1, 3, 3, 8, 8)
    masks = torch.zeros(2, 3, 16, dtype=torch.bool)
    masks[1, 0, :5] = True
    both = Student(student)(global_views, local_views, masks, masks.flatten().nonzero().squeeze(1), True)
    _, _, cls, patches = both
    assert cls.shape == (3, 3, 8)
    assert patches.shape == (5, 8)
    torch.testing.assert_close(cls[0], student(global_views[0]).cls)
    torch.testing.assert_close(cls[1], student(global_views[1], masks[1]).cls)
    torch.testing.assert_close(cls[2], student(local_views[0]).cls)
    torch.testing.assert_close(both.cls_features[2], student(local_views[0]).cls_features)
    alone = Student(student)(global_views, local_views[:0], masks, torch.tensor([1]), False)
    assert alone.cls.numel() == alone.cls_features.numel() == 0
    assert alone.patches.shape == (1, 8)


def test_sizes_must_fit_the_patch(tmp_path):
    with pytest.raises(ConfigError, match=r"views\.local_size"):
        networks_of(tiny_config(tmp_path, "views.local_size=9"))
