"""An own objective: a view's embedding moves toward the row of the memory nearest to another view (as in NNCLR).

    python examples/own_objective.py

It takes heads, memory and end of the step from SOP and replaces `learn`. One from scratch has all methods of
`Objective` (`objectives/dino.py` is the shortest). What is missing: `objective.kind` takes the names in
`objectives/choose.py` only.
"""

from own_data import random_images
from training import TINY, train

from sop_faiss.data.batch import Batch
from sop_faiss.model.networks import Networks
from sop_faiss.objectives.objective import Learned, StepSettings, studied
from sop_faiss.objectives.sop import SopObjective
from sop_faiss.objectives.term_metrics import no_sums


class NearestRow(SopObjective):
    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        global_views = networks.normalized(part.global_views, part.global_colors)
        local_views = networks.normalized(part.local_views, part.local_colors)
        teacher = networks.teach(global_views.flatten(0, 1), None, True)
        rows = self.terms["cls"].memory.embeddings
        shape = (*global_views.shape[:2], -1)
        positives = rows[(teacher.cls @ rows.T).argmax(1)].view(shape)  # (global views, images, dimension)
        features = teacher.cls_features.view(shape)
        learned = Learned({"cls": no_sums(networks.device)}, {"cls": teacher.cls.view(shape)[-1]}, features)
        for _, student in studied(networks, self.config, global_views, local_views, part.masks):
            loss = 1 - (student.cls[:, None] * positives).sum(-1).mean()  # all pairs of views
            learned.sums["cls"][0] += loss.detach()  # the first of a term's sums is its loss
            (loss * share).backward()
        return learned


if __name__ == "__main__":
    print("loss of each step:", train(random_images(), objective=NearestRow(TINY))[1])
