"""Networks: backbone, projector, teacher, and any encoder for evaluation."""
