"""The collectives and waits of a step, as `benchmarks/count_collectives.py` counts them under a fake process group."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.count_collectives import LOGGED_STEP, PLAIN_STEP, counted, run

SMALL = ("views.local_count=0", "sop.fill=random", "sop.cls.capacity=64", "sop.patch.capacity=64", "model.depth=2")


def test_waits_and_collectives_do_not_grow_with_the_ranks() -> None:
    (few, _), (many, state) = run("digits_demo", 4, *SMALL), run("digits_demo", 32, *SMALL)
    for step in (PLAIN_STEP - 1, LOGGED_STEP - 1):
        assert few[step].waits == many[step].waits
        assert sum(few[step].collectives.values()) == sum(many[step].collectives.values())
    plain = many[PLAIN_STEP - 1]
    small = {place.partition(":")[0]: n for place, n in plain.collectives.items() if " numbers " in place}
    assert small == dict.fromkeys(
        (
            "allgather of numbers  sop.py",
            *(f"allreduce of numbers  {file}.py" for file in ("term_metrics", "records", "stop")),
        ),
        1,
    )
    assert sum(n for place, n in plain.waits.items() if "member_weights" in place) == 2  # one for each loss term
    gradients = sum(parameter.numel() for parameter in state.student.parameters() if parameter.requires_grad)
    assert plain.sent["parameters"] == 4 * gradients
    assert plain.sent["rows"] == 2 * 64 * 64 * 4  # two memories, 64 images, 64 numbers in float32
    assert not dist.is_initialized()


def test_a_deeper_network_costs_what_its_blocks_add() -> None:
    four = counted("digits_demo", 4, *SMALL, "train.parallel=fsdp", "model.depth=4", depth=None)
    assert counted("digits_demo", 4, *SMALL, depth=4) == four
