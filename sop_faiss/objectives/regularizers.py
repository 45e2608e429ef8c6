"""Losses that spread the images of a batch apart, which an objective may add to its own (docs/method.md, 4).

Such a loss is a statistic of the complete batch, not a sum over parts of it. So its gradient is computed with respect
to the embeddings of all ranks and parts at once, and each part then sends its own rows of that gradient through the
network: exact, since d R(E)/d weights is the sum over rows e of dR/de times de/d weights.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional as F

from sop_faiss import distributed
from sop_faiss.config import RegularizerConfig
from sop_faiss.model.networks import Embedded

_KNOTS = torch.linspace(0.0, 5.0, 9)
"""Where characteristic functions are compared; LeJEPA takes 17 from -5 to 5, and the two halves are equal."""


class Regularizer:
    """A regularizer of the student's global views, and its gradient.

    Args:
        config: which one.
        seed: of the run, for its random directions.
    """

    def __init__(self, config: RegularizerConfig, seed: int) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(distributed.derive_seed("regularizer", seed))
        """Draws directions; the same on all ranks."""
        self.value: Float32[Tensor, ""] = torch.zeros(())
        """The step's, before its weight."""
        self._pulls: Float32[Tensor, "G b d"] | None = None

    def begin_step(self) -> None:
        """Forget the views of the step before."""
        self._pulls = None

    def look_ahead(self, parts: list[Embedded], views: int) -> None:
        """Take all parts of a step together, before the loss of the first one.

        Args:
            parts: what the student makes of each, global views first.
            views: G.
        """
        self.value, self._pulls = self.pull(torch.cat([self._seen(part, views) for part in parts], dim=1))

    def loss(self, part: Embedded, views: int, first: int) -> Float[Tensor, ""]:
        """Return a number with the gradient of the regularizer, times its weight, for a part of the step's images.

        Args:
            part: what the student makes of it, global views first; without `look_ahead` it is the complete step.
            views: G.
            first: number of the part's first image among this rank's.
        """
        own = self._seen(part, views)
        if self._pulls is None:
            self.value, self._pulls = self.pull(own)
        return self.config.weight * (own.float() * self._pulls[:, first : first + own.shape[1]]).sum()

    def _seen(self, part: Embedded, views: int) -> Float[Tensor, "G b _"]:
        return (part.cls_features if self.config.of_features() else part.cls)[:views]

    def pull(self, own: Float[Tensor, "G b d"]) -> tuple[Float32[Tensor, ""], Float32[Tensor, "G b d"]]:
        """Return a step's regularizer, that of the views of all ranks, and its gradient with respect to this rank's.

        The gradient is multiplied by the number of ranks, over which gradients will be averaged. All ranks call this
        together.

        Args:
            own: the global views of all of this rank's images, in any precision.
        """
        everywhere = distributed.gather_equal_rows(own.detach().float().transpose(0, 1).contiguous())
        first, count = distributed.rank() * own.shape[1], own.shape[1]
        directions = None
        if self.config.kind == "sigreg":
            drawn = torch.randn(self.config.directions, own.shape[2], generator=self.generator)
            directions = F.normalize(drawn, dim=1).to(own.device)
        with torch.enable_grad():
            seen = everywhere.requires_grad_()
            value = torch.stack([self._of_view(view, directions) for view in seen.unbind(1)]).mean()
        (gradient,) = torch.autograd.grad(value, seen)
        mine = gradient[first : first + count].transpose(0, 1) * distributed.world_size()
        return value.detach(), mine

    def _of_view(
        self, embeddings: Float32[Tensor, "b d"], directions: Float32[Tensor, "m d"] | None
    ) -> Float32[Tensor, ""]:
        if self.config.kind == "koleo":
            return koleo(F.normalize(embeddings, dim=1))
        if not self.config.of_features():
            # Of unit length: times sqrt(d), a uniform one has a variance of 1 in each direction.
            embeddings = embeddings * math.sqrt(embeddings.shape[1])
        if directions is not None:
            return sigreg(embeddings, directions)
        return variance_covariance(embeddings, self.config.covariance_weight)


def koleo(embeddings: Float[Tensor, "b d"]) -> Float[Tensor, ""]:
    """Return the KoLeo term (arXiv 1806.03198): minus the mean log distance of each embedding to its nearest one.

    Args:
        embeddings: of unit norm.
    """
    if len(embeddings) < 2:
        return embeddings.sum() * 0.0  # an image alone has no neighbor
    with torch.no_grad():
        nearest = (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1)
    tiny = 1e-8  # as in the released code, for equal embeddings
    return -(F.pairwise_distance(embeddings, embeddings[nearest], eps=tiny) + tiny).log().mean()


def variance_covariance(embeddings: Float[Tensor, "b d"], covariance_weight: float) -> Float[Tensor, ""]:
    """Return VICReg's variance and covariance terms (arXiv 2105.04906, equations 1 to 4).

    Args:
        embeddings: of one view.
        covariance_weight: of the covariances, relative to the variances.
    """
    count, dim = embeddings.shape
    if count < 2:
        return embeddings.sum() * 0.0  # one image has no variance
    centered = embeddings - embeddings.mean(0)
    tiny = 1e-4  # as in the paper, so that the root has a gradient at 0
    variance = F.relu(1.0 - (centered.square().sum(0) / (count - 1) + tiny).sqrt()).mean()
    covariances = centered.T @ centered / (count - 1)
    between = covariances.square().sum() - covariances.diagonal().square().sum()
    return variance + covariance_weight * between / dim


def sigreg(embeddings: Float[Tensor, "b d"], directions: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """Return LeJEPA's SIGReg (arXiv 2511.08544): how far projections are from a standard normal distribution.

    It is the Epps-Pulley statistic, the weighted squared distance of characteristic functions, integrated by the
    trapezoid rule, times the number of embeddings; its mean over the directions.

    Args:
        embeddings: of one view.
        directions: of unit norm.
    """
    knots = _KNOTS.to(embeddings)
    normal = (-0.5 * knots**2).exp()  # its characteristic function, and the weight of a knot
    angles = (embeddings @ directions.T).unsqueeze(2) * knots  # images, directions, knots
    real, imaginary = angles.cos().mean(0), angles.sin().mean(0)
    distances = ((real - normal).square() + imaginary.square()) * normal
    return 2.0 * torch.trapezoid(distances, knots, dim=1).mean() * len(embeddings)  # 2: both halves
