"""sop-eval: the paper's downstream tasks on any encoder."""

from __future__ import annotations

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS
from sop_faiss.cli.eval_attention import attention_command
from sop_faiss.cli.eval_backgrounds import backgrounds_command
from sop_faiss.cli.eval_correspondence import correspondence_command
from sop_faiss.cli.eval_detect import detect_command
from sop_faiss.cli.eval_finetune import finetune_command
from sop_faiss.cli.eval_label_free import label_free_command
from sop_faiss.cli.eval_logistic import logistic_command
from sop_faiss.cli.eval_map import map_command
from sop_faiss.cli.eval_robustness import robustness_command
from sop_faiss.cli.eval_segment import segment_command
from sop_faiss.cli.eval_suite import suite_command
from sop_faiss.cli.eval_transfer import transfer_command
from sop_faiss.cli.eval_unsupervised import unsupervised_command
from sop_faiss.cli.eval_video import video_command


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
def main() -> None:
    """Measure an encoder on a downstream task, or on a list of them.

    k-NN, the linear probe and retrieval have commands of their own: sop-knn, sop-linear, sop-retrieve.

    \b
    Examples:
      sop-eval logistic --model runs/photos --data imagenette/
      sop-eval suite leaderboard.yaml --model runs/photos --out board
    """


main.add_command(finetune_command)
main.add_command(transfer_command)
main.add_command(logistic_command)
main.add_command(unsupervised_command)
main.add_command(map_command)
main.add_command(attention_command)
main.add_command(correspondence_command)
main.add_command(video_command)
main.add_command(robustness_command)
main.add_command(backgrounds_command)
main.add_command(label_free_command)
main.add_command(detect_command)
main.add_command(segment_command)
main.add_command(suite_command)

if __name__ == "__main__":
    main()
